package api_test

import (
	"strconv"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// The rules of the definition name the settings there are, and say what the value of each can be. A new one must be
// named in both.
func TestSettingRules(t *testing.T) {
	crd, err := api.CRDs.ReadFile("crds/storage.drover.io_settings.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name := range api.Settings {
		if n := strings.Count(string(crd), "'"+name+"'"); n != 2 {
			t.Errorf("%s is named %d times in the rules, want once among all and once where they say what its value can be",
				name, n)
		}
		if !strings.Contains(strings.Join(strings.Fields(string(crd)), " "), " "+name) {
			t.Errorf("the message about unknown settings does not name %s", name)
		}
		if _, err := strconv.Atoi(api.Settings[name]); err != nil && strings.HasSuffix(name, "-percentage") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
