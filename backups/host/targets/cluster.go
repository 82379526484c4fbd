package targets

import (
	"context"
	"crypto/rand"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// settingClusterName is the setting with the name of the cluster in stores of backups.
const settingClusterName = "cluster-name"

// nodePart bounds the part of a generated name that is the name of a node, in bytes.
const nodePart = 40

// ClusterName is the host of the snapshots of the cluster's backups: the setting cluster-name. The first backup of a
// cluster creates the setting, from the name of the node and six random characters, because other clusters with a node
// of the name may use the store. live is without a cache.
func ClusterName(ctx context.Context, c client.Writer, live client.Reader, node string) (string, error) {
	s := &api.Setting{}
	err := live.Get(ctx, client.ObjectKey{Name: settingClusterName}, s)
	if apierrors.IsNotFound(err) {
		part := strings.TrimRight(node[:min(len(node), nodePart)], "-.")
		s = &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: settingClusterName},
			Value: part + "-" + strings.ToLower(rand.Text()[:6])}
		if err = c.Create(ctx, s); apierrors.IsAlreadyExists(err) { // another node was faster
			err = live.Get(ctx, client.ObjectKey{Name: settingClusterName}, s)
		}
	}
	return s.Value, api.Explain(err, "setting %s", settingClusterName)
}
