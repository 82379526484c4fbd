package sanity_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Sizes that keep the house readable. A part that is larger than its bound stands below with its size; the size may
// shrink, and the row leaves when the part meets the bound.
const (
	fileLines    = 600
	packageLines = 7500 // tests excepted
	typeMethods  = 100
)

var largerPackages = map[string]int{}

var largerTypes = map[string]int{}

func TestSizes(t *testing.T) {
	cmd := exec.Command("git", "ls-files", "*.go")
	cmd.Dir = ".."
	out, err := cmd.Output()
	must(t, err)
	packages, methods := map[string]int{}, map[string]int{}
	for _, path := range strings.Fields(string(out)) {
		if strings.HasPrefix(filepath.Base(path), "zz_generated") {
			continue
		}
		source, err := os.ReadFile(filepath.Join("..", path))
		if os.IsNotExist(err) {
			continue // moved, and not committed yet
		}
		must(t, err)
		lines := bytes.Count(source, []byte("\n"))
		if lines > fileLines {
			t.Errorf("%s has %d lines, at most %d are allowed; split the file by subject", path, lines, fileLines)
		}
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		dir := filepath.Dir(path)
		packages[dir] += lines
		f, err := parser.ParseFile(token.NewFileSet(), path, source, parser.SkipObjectResolution)
		must(t, err)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv != nil {
				methods[dir+"."+receiver(fn)]++
			}
		}
	}
	for dir, lines := range packages {
		if most := max(packageLines, largerPackages[dir]); lines > most {
			t.Errorf("package %s has %d lines, at most %d are allowed; split the package by what it owns", dir, lines, most)
		}
	}
	for name, n := range methods {
		if most := max(typeMethods, largerTypes[name]); n > most {
			t.Errorf("type %s has %d methods, at most %d are allowed; split the type by what it owns", name, n, most)
		}
	}
	if methods["replicas/engine.Engine"] < 10 || packages["api"] < 1000 {
		t.Errorf("the test counts too little: %v %v", methods, packages)
	}
}

// receiver names the type that a method belongs to.
func receiver(fn *ast.FuncDecl) string {
	expr := fn.Recv.List[0].Type
	for {
		switch e := expr.(type) {
		case *ast.StarExpr:
			expr = e.X
		case *ast.IndexExpr:
			expr = e.X
		case *ast.IndexListExpr:
			expr = e.X
		case *ast.Ident:
			return e.Name
		default:
			return "?"
		}
	}
}
