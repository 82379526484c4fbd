package targets

import (
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestClusterHasOneName: nodes that name the cluster at the same time, and later, take one name, which has the name of a
// node and is in the setting; a user may change the setting.
func TestClusterHasOneName(t *testing.T) {
	s := apitest.Start(t)
	names := make([]string, 8)
	var group sync.WaitGroup
	for i := range names {
		group.Go(func() {
			var err error
			if names[i], err = ClusterName(s.Ctx, s.Client, s.Client, "node-"+strings.Repeat("x", 34+i)+".local"); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	for _, name := range names {
		if name != names[0] || !strings.HasPrefix(name, "node-xxx") || len(name) > 48 {
			t.Errorf("names %q", names)
		}
	}
	set := &api.Setting{ObjectMeta: apitest.Named(settingClusterName)}
	if err := s.Client.Get(s.Ctx, client.ObjectKeyFromObject(set), set); err != nil || set.Value != names[0] {
		t.Errorf("%+v, %v", set, err)
	}
	for value, ok := range map[string]bool{"prod.eu-1": true, "": false, "Prod": false, "-x": false, "x-": false,
		strings.Repeat("x", 64): false, strings.Repeat("x", 63): true} {
		set.Value = value
		if err := s.Client.Update(s.Ctx, set); (err == nil) != ok {
			t.Errorf("%q: %v", value, err)
		}
	}
	set = &api.Setting{}
	must(t, s.Client.Get(s.Ctx, client.ObjectKey{Name: settingClusterName}, set))
	if name, err := ClusterName(s.Ctx, s.Client, s.Client, "other"); err != nil || name != set.Value {
		t.Errorf("%q, %v, want %q", name, err, set.Value)
	}
}
