package controller

import (
	"context"
	"testing"

	"drover.io/drover/api"
)

// TestDefaultReplicas: a StorageClass without a replica count gets the setting's, a strict-local volume a single
// replica.
func TestDefaultReplicas(t *testing.T) {
	set := &api.Setting{Value: "3"}
	set.Name = "default-replica-count"
	must(t, store.Create(t.Context(), set))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), set)) })
	loops(t, ready(t), attached(t))
	for _, x := range []struct {
		name       string
		parameters map[string]string
		want       int32
	}{
		{"replicas-default", nil, 3},
		{"replicas-said", map[string]string{"numberOfReplicas": "2"}, 2},
	} {
		req := request(x.name)
		req.Parameters = x.parameters
		res, err := door.CreateVolume(t.Context(), req)
		must(t, err)
		vol, err := door.readVolume(t.Context(), res.Volume.VolumeId)
		must(t, err)
		if vol.Spec.NumberOfReplicas != x.want {
			t.Errorf("%s has %d replicas, wants %d", x.name, vol.Spec.NumberOfReplicas, x.want)
		}
		again, err := door.CreateVolume(t.Context(), req)
		must(t, err)
		if again.Volume.VolumeId != res.Volume.VolumeId {
			t.Errorf("%s is made twice", x.name)
		}
	}
	if n, err := door.defaultReplicas(t.Context(), &api.VolumeSpec{DataLocality: localStrict}); n != 1 || err != nil {
		t.Errorf("a strict-local volume has %d replicas: %v", n, err)
	}
}
