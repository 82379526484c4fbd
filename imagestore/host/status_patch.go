package host

import (
	"encoding/json"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// statusPatch replaces a whole status: fields that the new status lacks are removed.
type statusPatch struct{ old, next api.ImageCopyStatus }

func (statusPatch) Type() types.PatchType { return types.MergePatchType }

func (p statusPatch) Data(client.Object) ([]byte, error) {
	old, next := map[string]any{}, map[string]any{}
	for _, s := range []struct {
		from api.ImageCopyStatus
		to   *map[string]any
	}{{p.old, &old}, {p.next, &next}} {
		b, err := json.Marshal(s.from)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(b, s.to); err != nil {
			return nil, err
		}
	}
	for k := range old {
		if _, ok := next[k]; !ok {
			next[k] = nil
		}
	}
	return json.Marshal(map[string]any{"status": next})
}
