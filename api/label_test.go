package api

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

func TestLabelValue(t *testing.T) {
	a60 := strings.Repeat("a", 60)
	for name, want := range map[string]string{
		"":                     "",
		"a":                    "a",
		"pvc-1.2":              "pvc-1.2",
		a60 + "aaa":            a60 + "aaa",
		a60 + "aaab":           a60 + "aaa",
		a60 + "aa-b":           a60 + "aa",
		a60 + "aa.b":           a60 + "aa",
		a60 + "a.-b":           a60 + "a",
		a60 + "---" + a60:      a60,
		a60 + "a-a.b":          a60 + "a-a",
		"a" + a60 + ".b.c-d-e": "a" + a60 + ".b",
	} {
		got := LabelValue(name)
		if got != want || LabelValue(got) != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
		if bad := validation.IsValidLabelValue(got); bad != nil {
			t.Errorf("%q: %q is no value of a label: %v", name, got, bad)
		}
	}
}
