package replica

import (
	"context"
	"encoding/json"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// volumeRecord is the copy of a volume's object for a disk; nil: the volume has no object.
func (rs *Replicas) volumeRecord(ctx context.Context, volume string) (json.RawMessage, error) {
	var v api.Volume
	err := rs.Client.Get(ctx, client.ObjectKey{Name: volume}, &v)
	if apierrors.IsNotFound(err) { // the cache of volumes can be behind the cache of replicas
		err = rs.Reader.Get(ctx, client.ObjectKey{Name: volume}, &v)
	}
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return v.Record()
}
