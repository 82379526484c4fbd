package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// TestGuardsAreFound: each snippet is in its file exactly once, and the tests that are to notice exist. Edits of the code
// must bring the list along.
func TestGuardsAreFound(t *testing.T) {
	all, err := readGuards("guards.txt")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	word := regexp.MustCompile(`Test\w+`)
	for _, g := range all {
		if names[g.name] {
			t.Errorf("two guards are called %q", g.name)
		}
		names[g.name] = true
		text, err := os.ReadFile(filepath.Join("../..", g.file))
		if err != nil {
			t.Errorf("guard %q: %v", g.name, err)
			continue
		}
		if without, err := g.replace(text); err != nil {
			t.Error(err)
		} else if bytes.Equal(without, text) {
			t.Errorf("guard %q: nothing changes without it", g.name)
		}
		files, err := filepath.Glob(filepath.Join("../..", g.pkg, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("guard %q: package %s has no tests: %v", g.name, g.pkg, err)
		}
		var tests []byte
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			tests = append(tests, text...)
		}
		for _, name := range word.FindAllString(g.run, -1) {
			if !bytes.Contains(tests, []byte("func "+name+"(")) {
				t.Errorf("guard %q: package %s has no %s", g.name, g.pkg, name)
			}
		}
	}
	if len(all) < 31 {
		t.Errorf("%d guards", len(all))
	}
}
