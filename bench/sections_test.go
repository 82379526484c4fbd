package main

import (
	"strings"
	"testing"
)

// TestOnly: -only refuses an unknown section and names all known sections.
func TestOnly(t *testing.T) {
	for only, unknown := range map[string]string{
		"": "", "idle": "", "qcow2-zlib,merge,pause": "", "images,rebuild": "",
		"indx": "indx", "idle,quow2": "quow2", "idle, index": " index", "idle,": "",
	} {
		err := (&bench{options: options{only: only}}).checkOnly()
		switch wrong := unknown != "" || strings.HasSuffix(only, ","); {
		case !wrong && err != nil:
			t.Errorf("%q: %v", only, err)
		case wrong && (err == nil || !strings.Contains(err.Error(), "idle, images, incremental")):
			t.Errorf("%q: %v", only, err)
		case wrong && !strings.Contains(err.Error(), unknown):
			t.Errorf("%q: %v does not name it", only, err)
		}
	}
}
