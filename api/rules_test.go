package api_test

import (
	"strconv"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// The rules of the definition name the settings whose value is a number. A new one must be named there too.
func TestSettingRules(t *testing.T) {
	crd, err := api.CRDs.ReadFile("crds/drover.io_settings.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name := range api.Settings {
		if !strings.Contains(string(crd), "'"+name+"'") {
			t.Errorf("no rule says what the value of %s can be", name)
		}
		if _, err := strconv.Atoi(api.Settings[name]); err != nil && strings.HasSuffix(name, "-percentage") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
