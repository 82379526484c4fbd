package sanity_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
)

// Scripts, dashboards, alerts and manifests of users name things. testdata/names has all names that users may use: a
// change or removal of a name breaks something of the users, and needs a word in CHANGELOG.md.
//
//	DROVER_WRITE_NAMES=1 go test -run TestNames ./sanity
//
// writes the files again.

// sameNames compares names with the recorded names.
func sameNames(t *testing.T, file string, least int, names map[string]bool) {
	t.Helper()
	var now []string
	for n := range names {
		now = append(now, n)
	}
	slices.Sort(now)
	if len(now) < least {
		t.Fatalf("only %d names found: this test looks at the wrong place", len(now))
	}
	path := filepath.Join("testdata", "names", file)
	if os.Getenv("DROVER_WRITE_NAMES") != "" {
		must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(strings.Join(now, "\n")+"\n"), 0o644)))
		return
	}
	raw, err := os.ReadFile(path)
	must(t, err)
	was := strings.Split(strings.TrimSuffix(string(raw), "\n"), "\n")
	for _, n := range was {
		if !names[n] {
			t.Errorf("%q was removed or renamed: users may name it, as %s says", n, path)
		}
	}
	for _, n := range now {
		if !slices.Contains(was, n) {
			t.Errorf("%q is new: add it to %s", n, path)
		}
	}
}

var flagWords = regexp.MustCompile(`^ +(?:-([a-z]), +)?--([a-z-]+)(?:\[=true\|false\])?(?: ([a-zA-Z]+))?(?:  |$)`)

// TestNamesOfCommands: commands, their aliases, and flags with their letter and type.
func TestNamesOfCommands(t *testing.T) {
	names := map[string]bool{}
	eachCommand(t, func(path []string, help string, _ bool) {
		command := strings.TrimSpace("drover " + strings.Join(path, " "))
		names[command] = true
		for _, part := range []string{"\nAliases:\n", "\nFlags:\n", "\nGlobal Flags:\n"} {
			_, lines, _ := strings.Cut(help, part)
			lines, _, _ = strings.Cut(lines, "\n\n")
			for line := range strings.Lines(lines) {
				line = strings.TrimSuffix(line, "\n")
				if m := flagWords.FindStringSubmatch(line); m != nil {
					names[strings.TrimSpace(fmt.Sprintf("%s --%s %s %s", command, m[2], m[1], m[3]))] = true
				} else if part == "\nAliases:\n" {
					names[command+" aliases: "+strings.TrimSpace(line)] = true
				}
			}
		}
	})
	sameNames(t, "commands.txt", 200, names)
}

// TestNamesOfMetrics: metrics and their labels.
func TestNamesOfMetrics(t *testing.T) {
	names := map[string]bool{}
	metricNames(t, func(name string, around []ast.Node) {
		for _, n := range around {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				continue
			}
			if made, ok := call.Fun.(*ast.SelectorExpr); ok && strings.HasPrefix(made.Sel.Name, "New") {
				names[name+"{"+strings.Join(labelsOf(t, call, around[0]), ",")+"}"] = true
			}
		}
	})
	sameNames(t, "metrics.txt", 20, names)
}

// labelsOf returns the labels of a metric: a list on the spot, or a variable of the file.
func labelsOf(t *testing.T, call *ast.CallExpr, file ast.Node) (labels []string) {
	t.Helper()
	for _, arg := range call.Args {
		if id, ok := arg.(*ast.Ident); ok {
			ast.Inspect(file, func(n ast.Node) bool {
				if v, ok := n.(*ast.ValueSpec); ok && len(v.Names) == 1 && v.Names[0].Name == id.Name && len(v.Values) == 1 {
					arg = v.Values[0]
				}
				return true
			})
		}
		list, ok := arg.(*ast.CompositeLit)
		if !ok {
			continue
		}
		if _, ok := list.Type.(*ast.ArrayType); !ok {
			continue
		}
		for _, e := range list.Elts {
			lit, ok := e.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				t.Errorf("a label that is no constant")
				continue
			}
			s, err := strconv.Unquote(lit.Value)
			must(t, err)
			labels = append(labels, s)
		}
	}
	return labels
}

// foreign are capitalised words of formats and of HTTP.
var foreign = []string{"Accept", "Authorization", "BZh", "Connection", "ETag", "Host", "Parallels", "Range", "Referer",
	"Trailer", "Upgrade", "WithouFreSpacExt", "WithoutFreeSpace"}

// TestNamesOfReasons: types and reasons of conditions, reasons and actions of events, states and kinds. All of them
// are capitalised words; other capitalised words in the source of these packages are foreign.
func TestNamesOfReasons(t *testing.T) {
	names, word := map[string]bool{}, regexp.MustCompile(`^[A-Z][A-Za-z]+[a-z]$`)
	for _, room := range []string{"api", "backups/host", "backups/planner", "controller", "imagestore", "node", "replicas"} {
		literals(t, room, func(s string, _ []ast.Node) {
			if word.MatchString(s) && !slices.Contains(foreign, s) {
				names[s] = true
			}
		})
	}
	sameNames(t, "reasons.txt", 50, names)
}

// TestNamesOfSettings: settings with default values.
func TestNamesOfSettings(t *testing.T) {
	names := map[string]bool{}
	for name, value := range api.Settings {
		names[name+"="+value] = true
	}
	sameNames(t, "settings.txt", 5, names)
}

// TestNamesOfStorageClassKeys: the keys of StorageClasses.
func TestNamesOfStorageClassKeys(t *testing.T) {
	sameNames(t, "storageclass.txt", 40, storageClassKeys(t))
}

// TestNamesOfLabels: labels, annotations and finalizers.
func TestNamesOfLabels(t *testing.T) {
	names, name := map[string]bool{}, regexp.MustCompile(`^[a-z.]*drover\.io/[a-z-]+$`)
	literals(t, "", func(s string, around []ast.Node) {
		if _, imports := around[len(around)-1].(*ast.ImportSpec); !imports && name.MatchString(s) {
			names[s] = true
		}
	})
	sameNames(t, "labels.txt", 10, names)
}

// schemaOf is the named parts of a definition.
type schemaOf struct {
	Type                 string
	Format               string
	Enum                 []any
	Properties           map[string]schemaOf
	Items                *schemaOf
	AdditionalProperties *schemaOf
	Required             []string
}

func (s schemaOf) walk(path string, names map[string]bool) {
	names[strings.TrimSpace(path+" "+s.Type+" "+s.Format)] = true
	for _, v := range s.Enum {
		names[fmt.Sprintf("%s = %v", path, v)] = true
	}
	for _, r := range s.Required {
		names[path+"."+r+" required"] = true
	}
	for name, p := range s.Properties {
		p.walk(path+"."+name, names)
	}
	if s.Items != nil {
		s.Items.walk(path+"[]", names)
	}
	if s.AdditionalProperties != nil {
		s.AdditionalProperties.walk(path+"{}", names)
	}
}

// TestNamesOfObjects: kinds, short names, printer columns, fields with their types and values.
func TestNamesOfObjects(t *testing.T) {
	names := map[string]bool{}
	files, err := filepath.Glob("../api/crds/*.yaml")
	must(t, err)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		must(t, err)
		var d struct {
			Spec struct {
				Group, Scope string
				Names        struct {
					Kind, ListKind, Plural, Singular string
					ShortNames, Categories           []string
				}
				Versions []struct {
					Name                     string
					Served, Storage          bool
					AdditionalPrinterColumns []struct{ Name, Type, JSONPath string }
					SelectableFields         []struct{ JSONPath string }
					Schema                   struct{ OpenAPIV3Schema schemaOf }
					Subresources             map[string]any
				}
			}
		}
		must(t, yaml.Unmarshal(raw, &d))
		n := d.Spec.Names
		names["group "+d.Spec.Group] = true
		names[fmt.Sprintf("%s: %s %s %s %s %v %v", n.Kind, d.Spec.Scope, n.Plural, n.Singular, n.ListKind, n.ShortNames,
			n.Categories)] = true
		for _, v := range d.Spec.Versions {
			kind := n.Kind + "/" + v.Name
			names[fmt.Sprintf("%s served %v, stored %v", kind, v.Served, v.Storage)] = true
			for _, c := range v.AdditionalPrinterColumns {
				names[fmt.Sprintf("%s column %q: %s of %s", kind, c.Name, c.Type, c.JSONPath)] = true
			}
			for _, f := range v.SelectableFields {
				names[kind+" selectable "+f.JSONPath] = true
			}
			for s := range v.Subresources {
				names[kind+" subresource "+s] = true
			}
			v.Schema.OpenAPIV3Schema.walk(kind, names)
		}
	}
	sameNames(t, "objects.txt", 200, names)
}
