package replica

import (
	"context"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/host/localnode"
)

// TestRecordThatTheCacheLacks: the record of a new volume is complete, even while the cache lacks the volume.
func TestRecordThatTheCacheLacks(t *testing.T) {
	t.Parallel()
	suite.System(t)
	server := apitest.Start(t)
	v := apitest.Volume("stale", 16<<20)
	v.Spec.FSType = "xfs"
	server.Create(v)
	behind := interceptor.NewClient(server.Client, interceptor.Funcs{Get: func(_ context.Context, _ client.WithWatch,
		key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}})
	rs := &Replicas{Node: &localnode.Node{Client: behind, Reader: server.Client}}
	if object, err := rs.volumeRecord(server.Ctx, "stale"); err != nil || !strings.Contains(string(object), `"fsType":"xfs"`) {
		t.Errorf("%s, %v", object, err)
	}
	if object, err := rs.volumeRecord(server.Ctx, "none"); err != nil || object != nil {
		t.Errorf("of no volume: %s, %v", object, err)
	}
}
