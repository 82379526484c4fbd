package host

import (
	"encoding/json"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// statusPatch replaces a whole status: the patch names every field of the type and removes those that the new status
// lacks. The cached object cannot tell which ones the server has, because the cache may be behind the last patch.
type statusPatch struct{ next api.ImageCopyStatus }

func (statusPatch) Type() types.PatchType { return types.MergePatchType }

func (p statusPatch) Data(client.Object) ([]byte, error) {
	b, err := json.Marshal(p.next)
	if err != nil {
		return nil, err
	}
	status := map[string]any{}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[api.ImageCopyStatus]()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		status[name] = nil
	}
	if err := json.Unmarshal(b, &status); err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{"status": status})
}
