package preflight

import (
	"strings"
	"testing"
)

func TestPreflightTellsOfThisMachine(t *testing.T) {
	all := Run([]string{t.TempDir(), "/nosuch/below"})
	seen := map[string]string{}
	for _, f := range all {
		seen[f.Check] = f.Result
		if f.Result != OK && f.Advice == "" {
			t.Errorf("%s is %s without advice", f.Check, f.Result)
		}
	}
	for _, c := range []string{"root", "kernel", "fuse", "loop", "io-flusher", "mount", "mkfs.ext4"} {
		if seen[c] != OK && seen[c] != Warning {
			t.Errorf("%s: %q on a machine that runs these tests", c, seen[c])
		}
	}
	if f := checkTool("nosuch-tool", "nosuch", Failed); f.Result != Failed || !strings.Contains(f.Advice, "package nosuch") {
		t.Errorf("%+v", f)
	}
}
