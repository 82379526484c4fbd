package sanity_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
	"drover.io/drover/driver"
)

// The tests compare the documents with the source: links lead somewhere, and the documents describe the program's
// names.

// markdown is every document, by path from the root of the repository.
func markdown(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "bin"):
			return filepath.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ".md"):
			b, err := os.ReadFile(path)
			docs[strings.TrimPrefix(path, "../")] = string(b)
			return err
		}
		return nil
	})
	must(t, err)
	if len(docs) < 5 {
		t.Fatalf("only %d documents found", len(docs))
	}
	return docs
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	fence   = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	notSlug = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// broken lists the relative links of a document that lead nowhere.
func broken(docs map[string]string, path string) (out []string) {
	for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(docs[path], ""), -1) {
		to, anchor, _ := strings.Cut(m[1], "#")
		if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
			continue
		}
		target, exists := path, true
		if to != "" {
			target = filepath.Join(filepath.Dir(path), to)
			_, err := os.Stat(filepath.Join("..", target))
			exists = err == nil
		}
		if !exists || anchor != "" && !slices.Contains(anchors(docs[target]), anchor) {
			out = append(out, m[1])
		}
	}
	return out
}

// anchors are the headings of a document as links name them.
func anchors(text string) (out []string) {
	for _, h := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		out = append(out, strings.ReplaceAll(notSlug.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-"))
	}
	return out
}

func TestDocsLinks(t *testing.T) {
	docs := markdown(t)
	for path := range docs {
		for _, l := range broken(docs, path) {
			t.Errorf("%s: the link %s leads nowhere", path, l)
		}
	}
	docs["docs/x.md"] = "# A b\n[1](#a-b) [2](../README.md) [3](nowhere.md) [4](#c) [5](https://x/y)"
	if got := broken(docs, "docs/x.md"); !slices.Equal(got, []string{"nowhere.md", "#c"}) {
		t.Errorf("this test finds %q", got)
	}
}

// literals calls see with each string constant of the program's source, tests excepted, and the nodes around it.
func literals(t *testing.T, dir string, see func(s string, around []ast.Node)) {
	t.Helper()
	must(t, filepath.WalkDir(filepath.Join("..", dir), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		var around []ast.Node
		ast.Inspect(f, func(n ast.Node) bool {
			if n == nil {
				around = around[:len(around)-1]
				return true
			}
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if s, err := strconv.Unquote(lit.Value); err == nil {
					see(s, around)
				}
			}
			around = append(around, n)
			return true
		})
		return nil
	}))
}

// mentioned fails for each name that a document does not have as code.
func mentioned(t *testing.T, doc string, what string, least int, names map[string]bool) {
	t.Helper()
	text := markdown(t)[doc]
	for name := range names {
		if !regexp.MustCompile("`" + regexp.QuoteMeta(name) + "[`{ =\\[]").MatchString(text) {
			t.Errorf("%s does not describe the %s %s", doc, what, name)
		}
	}
	if len(names) < least {
		t.Errorf("only %d %ss found in the source: this test looks at the wrong place", len(names), what)
	}
}

// storageClassKeys are the keys of the controller's table.
func storageClassKeys(t *testing.T) map[string]bool {
	t.Helper()
	keys := map[string]bool{}
	literals(t, "controller", func(s string, around []ast.Node) {
		for i, n := range around {
			v, ok := n.(*ast.ValueSpec)
			if !ok || v.Names[0].Name != "parameters" || i+2 >= len(around) {
				continue
			}
			if kv, ok := around[len(around)-1].(*ast.KeyValueExpr); ok && len(around) == i+3 {
				if k, ok := kv.Key.(*ast.BasicLit); ok && k.Value == strconv.Quote(s) {
					keys[s] = true
				}
			}
		}
	})
	return keys
}

func TestDocsStorageClassKeys(t *testing.T) {
	mentioned(t, "docs/storageclass.md", "key", 40, storageClassKeys(t))
}

// metricNames calls see with the name of each metric in the source, and the nodes around it.
func metricNames(t *testing.T, see func(s string, around []ast.Node)) {
	t.Helper()
	name := regexp.MustCompile(`^drover_[a-z_]+$`)
	literals(t, "", func(s string, around []ast.Node) {
		if name.MatchString(s) {
			see(s, around)
		}
	})
}

func TestDocsMetrics(t *testing.T) {
	found := map[string]bool{}
	metricNames(t, func(s string, _ []ast.Node) { found[s] = true })
	mentioned(t, "docs/operations.md", "metric", 10, found)
	// And the document promises no metric that does not exist.
	for _, m := range regexp.MustCompile("`(drover_[a-z_]+)`").FindAllStringSubmatch(markdown(t)["docs/operations.md"], -1) {
		if !found[m[1]] {
			t.Errorf("docs/operations.md describes %s, which is no metric", m[1])
		}
	}
}

func TestDocsServeFlags(t *testing.T) {
	flags := map[string]bool{}
	literals(t, "driver", func(s string, around []ast.Node) {
		call, ok := around[len(around)-1].(*ast.CallExpr)
		if !ok || len(call.Args) < 3 {
			return
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		lit, isName := call.Args[1].(*ast.BasicLit)
		if !ok || !strings.HasSuffix(sel.Sel.Name, "Var") || !isName || lit.Value != strconv.Quote(s) {
			return
		}
		for _, n := range around {
			if f, ok := n.(*ast.FuncDecl); ok && (f.Name.Name == "serveCommand" || f.Name.Name == "addLogFlags") {
				flags["--"+s] = true
			}
		}
	})
	mentioned(t, "docs/operations.md", "flag", 10, flags)
}

func TestDocsSettings(t *testing.T) {
	names := map[string]bool{}
	text := markdown(t)["docs/operations.md"]
	for name, value := range api.Settings {
		names[name] = true
		if row := fmt.Sprintf("| `%s` | %s |", name, value); !strings.Contains(text, row) {
			t.Errorf("docs/operations.md does not say: %s", row)
		}
	}
	mentioned(t, "docs/operations.md", "setting", 5, names)
}

// TestDocsExamples: a parser reads the objects in the documents, and StorageClasses use keys that exist.
func TestDocsExamples(t *testing.T) {
	keys, classes := storageClassKeys(t), 0
	for path, text := range markdown(t) {
		for _, block := range fence.FindAllStringSubmatch(text, -1) {
			if block[1] != "yaml" {
				continue
			}
			for _, one := range strings.Split(block[2], "\n---\n") {
				var o struct {
					APIVersion, Kind, Provisioner, DriverName string
					Parameters                                map[string]string
				}
				if err := yaml.Unmarshal([]byte(one), &o); err != nil || o.Kind == "" || o.APIVersion == "" {
					t.Errorf("%s: not an object (%v):\n%s", path, err, one)
				}
				if o.Kind != "StorageClass" && o.Kind != "VolumeAttributesClass" {
					continue
				}
				classes++
				if o.Provisioner+o.DriverName != api.DriverName {
					t.Errorf("%s: a class of driver %q", path, o.Provisioner+o.DriverName)
				}
				for k := range o.Parameters {
					if !keys[k] {
						t.Errorf("%s: a class with the parameter %s, which does not exist", path, k)
					}
				}
			}
		}
	}
	if classes < 4 {
		t.Errorf("only %d classes found", classes)
	}
}

var (
	subCommand = regexp.MustCompile(`(?m)^  ([a-z]+)  +[A-Z]`)
	flagLine   = regexp.MustCompile(`(?m)^ +(?:-[a-z], +)?(--[a-z-]+)`)
)

// eachCommand reads the help of every command; path is empty for the program.
func eachCommand(t *testing.T, see func(path []string, help string, last bool)) {
	t.Helper()
	var walk func(path ...string)
	walk = func(path ...string) {
		var out bytes.Buffer
		c := driver.Command()
		c.SetOut(&out)
		c.SetErr(&out)
		c.SetArgs(append(path, "--help"))
		if err := c.Execute(); err != nil {
			t.Fatalf("help of %v: %v\n%s", path, err, &out)
		}
		text := out.String()
		_, subs, more := strings.Cut(text, "Available Commands:\n")
		see(path, text, !more)
		if !more {
			return
		}
		subs, _, _ = strings.Cut(subs, "\n\n")
		for _, m := range subCommand.FindAllStringSubmatch(subs, -1) {
			if m[1] != "help" && m[1] != "completion" {
				walk(append(slices.Clone(path), m[1])...)
			}
		}
	}
	walk()
}

// TestDocsCommands walks the help of the program.
func TestDocsCommands(t *testing.T) {
	docs := markdown(t)
	commands, flags := map[string]bool{}, map[string]bool{}
	eachCommand(t, func(path []string, text string, last bool) {
		if last {
			commands["drover "+strings.Join(path, " ")] = true
		}
		if _, own, ok := strings.Cut(text, "\nFlags:\n"); ok && path != nil && path[0] != "serve" {
			own, _, _ = strings.Cut(own, "\n\n")
			for _, m := range flagLine.FindAllStringSubmatch(own, -1) {
				if m[1] != "--help" {
					flags[m[1]] = true
				}
			}
		}
	})
	mentioned(t, "docs/cli.md", "command", 20, commands)
	mentioned(t, "docs/cli.md", "flag", 15, flags)
	for _, m := range regexp.MustCompile("`(--[a-z-]+)").FindAllStringSubmatch(docs["docs/cli.md"], -1) {
		if !flags[m[1]] {
			t.Errorf("docs/cli.md describes %s, which is no flag", m[1])
		}
	}
}
