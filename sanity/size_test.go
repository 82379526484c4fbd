package sanity_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// Sizes for a readable house.
const (
	lineWidth    = 120 // characters, a tab counts as one; tests, markers of kubebuilder and tags excepted
	fileLines    = 600
	packageLines = 7500 // tests excepted
	typeMethods  = 100
	oneWordNames = 15 // percent of the unexported functions whose name has no object: acknowledge, but not sealLayer
)

var isMarkerOrTag = regexp.MustCompile(`^\s*// \+kubebuilder:|json:"`)

var oneWord = regexp.MustCompile(`^[a-z]+$`)

func TestSizes(t *testing.T) {
	cmd := exec.Command("git", "ls-files", "*.go")
	cmd.Dir = ".."
	out, err := cmd.Output()
	must(t, err)
	packages, methods := map[string]int{}, map[string]int{}
	functions, short := 0, 0
	for _, path := range strings.Fields(string(out)) {
		if strings.HasPrefix(filepath.Base(path), "zz_generated") {
			continue
		}
		source, err := os.ReadFile(filepath.Join("..", path))
		if os.IsNotExist(err) {
			continue // moved, not committed yet
		}
		must(t, err)
		lines := bytes.Count(source, []byte("\n"))
		if lines > fileLines {
			t.Errorf("%s has %d lines, at most %d are allowed; split the file by subject", path, lines, fileLines)
		}
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		for i, line := range strings.Split(string(source), "\n") {
			if n := utf8.RuneCountInString(line); n > lineWidth && !isMarkerOrTag.MatchString(line) {
				t.Errorf("%s:%d has %d characters, at most %d are allowed; break the line", path, i+1, n, lineWidth)
			}
		}
		dir := filepath.Dir(path)
		packages[dir] += lines
		f, err := parser.ParseFile(token.NewFileSet(), path, source, parser.SkipObjectResolution)
		must(t, err)
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if fn.Recv != nil {
				methods[dir+"."+receiver(fn)]++
			}
			if name := fn.Name.Name; !fn.Name.IsExported() && name != "main" && name != "init" {
				functions++
				if oneWord.MatchString(name) {
					short++
				}
			}
		}
	}
	for dir, lines := range packages {
		if lines > packageLines {
			t.Errorf("package %s has %d lines, at most %d are allowed; split the package by what it owns", dir, lines,
				packageLines)
		}
	}
	for name, n := range methods {
		if n > typeMethods {
			t.Errorf("type %s has %d methods, at most %d are allowed; split the type by what it owns", name, n, typeMethods)
		}
	}
	if percent := 100 * short / functions; percent > oneWordNames {
		t.Errorf("%d of %d unexported functions (%d %%) have a name of one word, at most %d %% are allowed; a name is a "+
			"verb and its object", short, functions, percent, oneWordNames)
	}
	if methods["replicas/engine.Engine"] < 10 || packages["api"] < 1000 {
		t.Errorf("the test counts too little: %v %v", methods, packages)
	}
}

// receiver names the type of a method.
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
