package sanity_test

import (
	"bufio"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The prose of the house: a sentence names its actor and its object (docs/glossary.md). The test measures the visible
// part of this rule per package and document, and compares the figures with two bounds: the goal, which every new
// room meets, and for older text the figures in testdata/prose.txt, which only ever become smaller.

var lowerProse = flag.Bool("lower-prose", false, "write smaller figures into testdata/prose.txt, never larger ones")

// prose has the figures of a package's comments and errors, or of a document.
type prose struct {
	words    int
	pronouns int // words that stand for a noun
	openings int // sentences that begin with a relative word instead of their actor
	banned   int // phrases that the glossary replaces
	errors   int // errors that name no object
}

// proseGoal bounds plain text: pronouns per 1,000 words as in the best projects of this kind, the rest zero.
var proseGoal = proseFigures{pronouns: 60}

type proseFigures struct{ pronouns, openings, banned, errors int }

func (p prose) figures() proseFigures {
	return proseFigures{1000 * p.pronouns / max(p.words, 1), p.openings, p.banned, p.errors}
}

var (
	proseWord    = regexp.MustCompile(`[A-Za-z']+`)
	proseOpening = regexp.MustCompile(`(?:^|[.!?:]\s+|\n\s*[-|]?\s*)(?:What|Who|Where|Whoever|Of)\s`)
	proseBanned  = regexp.MustCompile(`(?i)\b(?:anew|told of|made (?:equal|whole|true|alike)|on (?:its|their) way|under way|` +
		`go(?:es)? on|at last|of no use)\b`)
	// proseMessage has phrases that messages avoid and documents may use with another meaning: a message names its
	// actor and its object.
	proseMessage = regexp.MustCompile(`(?i)\b(?:it goes|goes (?:when|with)|(?:is|are) there|there (?:is|are) (?:no|nothing)|` +
		`what (?:was|were|is|are|it|they|can|has|had)|whoever|nobody|somebody|the ones? (?:that|who))\b`)
	// proseMessageOpening has the openings of proseOpening. A message often begins with a small letter, and a line break
	// in a help text begins no sentence.
	proseMessageOpening = regexp.MustCompile(`(?:^|[.!?:;]\s+)(?:[Ww]hat|[Ww]ho|[Ww]here|[Ww]hoever|Of)\s`)
	proseError          = regexp.MustCompile(`^(?:it|its|what|who|whoever|nobody|nothing|somebody|they|that|those|there)\b`)
	prosePronoun        = map[string]bool{}
)

func init() {
	for _, w := range strings.Fields("it its itself that those what whatever one ones who whom whose whoever they them " +
		"their this these none nobody somebody") {
		prosePronoun[w] = true
	}
}

func (p *prose) add(text string) {
	for _, w := range proseWord.FindAllString(text, -1) {
		p.words++
		if prosePronoun[strings.ToLower(w)] {
			p.pronouns++
		}
	}
	p.openings += len(proseOpening.FindAllString(text, -1))
	p.banned += len(proseBanned.FindAllString(text, -1))
}

// addFile measures the comments of a Go file, its messages and the openings of its errors, of a test the comments
// alone. The text of the file is src, or with nil the content of path.
func (p *prose) addFile(t *testing.T, path string, src any) {
	f, err := parser.ParseFile(token.NewFileSet(), path, src, parser.ParseComments|parser.SkipObjectResolution)
	must(t, err)
	p.addComments(f)
	if strings.HasSuffix(path, "_test.go") {
		return
	}
	p.addMessages(f)
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if name := calledName(call); name != "Errorf" && name != "New" && name != "corrupt" && name != "unsupported" {
			return true
		}
		for _, arg := range call.Args {
			if lit, ok := arg.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if s, err := strconv.Unquote(lit.Value); err == nil && proseError.MatchString(s) {
					p.errors++
				}
			}
		}
		return true
	})
}

func (p *prose) addComments(f *ast.File) {
	for _, group := range f.Comments {
		p.add(group.Text())
	}
}

// addMessages counts the banned phrases and openings in the string literals of a file with several words. Literals
// joined by + are one text. Tags of fields are no messages.
func (p *prose) addMessages(f *ast.File) {
	joined := map[ast.Expr]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Field:
			joined[n.Tag] = n.Tag != nil
		case ast.Expr:
			if text := messageText(n, joined); strings.Contains(text, " ") {
				p.banned += len(proseBanned.FindAllString(text, -1)) + len(proseMessage.FindAllString(text, -1))
				p.openings += len(proseMessageOpening.FindAllString(text, -1))
			}
		}
		return true
	})
}

// messageText is the text of a literal, or of a sum of literals with a mark for each other operand. The text of an
// operand in joined is empty: the sum has the text already.
func messageText(e ast.Expr, joined map[ast.Expr]bool) string {
	if joined[e] {
		return ""
	}
	switch e := e.(type) {
	case *ast.BasicLit:
		joined[e] = true
		if s, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING {
			return s
		}
	case *ast.BinaryExpr:
		joined[e] = true
		if e.Op == token.ADD {
			return messageText(e.X, joined) + messageText(e.Y, joined)
		}
	}
	return "\x00"
}

// calledName is the name of a called function or method, without package or receiver.
func calledName(call *ast.CallExpr) string {
	switch fun := call.Fun.(type) {
	case *ast.SelectorExpr:
		return fun.Sel.Name
	case *ast.Ident:
		return fun.Name
	}
	return ""
}

// measureProse measures every package by its folder, its tests by the folder and "_test", and every document by its
// path.
func measureProse(t *testing.T) map[string]*prose {
	all := map[string]*prose{}
	must(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir() && (name == ".git" || name == "bin" || name == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go"), strings.HasPrefix(name, "zz_generated"):
			return nil
		}
		dir := strings.TrimPrefix(filepath.Dir(path), "../")
		if strings.HasSuffix(name, "_test.go") {
			dir += "_test"
		}
		if all[dir] == nil {
			all[dir] = &prose{}
		}
		all[dir].addFile(t, path, nil)
		return nil
	}))
	for path, text := range markdown(t) {
		if path == "docs/glossary.md" { // the glossary lists the words that others avoid
			continue
		}
		all[path] = &prose{}
		all[path].add(fence.ReplaceAllString(text, ""))
	}
	return all
}

const proseFile = "testdata/prose.txt"

// readProse reads the figures allowed for older text.
func readProse(t *testing.T) map[string]proseFigures {
	f, err := os.Open(proseFile)
	must(t, err)
	defer f.Close()
	known := map[string]proseFigures{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if line := lines.Text(); line != "" && !strings.HasPrefix(line, "#") {
			var name string
			var k proseFigures
			_, err := fmt.Sscan(line, &name, &k.pronouns, &k.openings, &k.banned, &k.errors)
			must(t, err)
			known[name] = k
		}
	}
	return known
}

func writeProse(t *testing.T, known map[string]proseFigures) {
	out := "# What older text still has: pronouns per 1,000 words, sentences that begin with a relative word, banned phrases,\n" +
		"# errors that name no object. `go test ./sanity -run TestProse -lower-prose` writes smaller figures, never larger ones.\n"
	for _, name := range slices.Sorted(maps.Keys(known)) {
		k := known[name]
		out += fmt.Sprintf("%s %d %d %d %d\n", name, k.pronouns, k.openings, k.banned, k.errors)
	}
	must(t, os.WriteFile(proseFile, []byte(out), 0o644))
}

func TestProseBecomesPlainer(t *testing.T) {
	known, all := readProse(t), measureProse(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		is, bound := all[name].figures(), proseGoal
		if k, older := known[name]; older {
			bound = proseFigures{max(bound.pronouns, k.pronouns), k.openings, k.banned, k.errors}
		}
		for _, f := range []struct {
			what      string
			is, bound int
		}{
			{"pronouns per 1,000 words", is.pronouns, bound.pronouns},
			{"sentences that begin with What, Who, Where, Whoever or Of", is.openings, bound.openings},
			{"phrases that the glossary replaces", is.banned, bound.banned},
			{"errors that name no object", is.errors, bound.errors},
		} {
			if f.is > f.bound && (f.what != "pronouns per 1,000 words" || all[name].words >= 100) {
				t.Errorf("%s: %d %s, at most %d allowed; docs/glossary.md says how to write them", name, f.is, f.what, f.bound)
			}
		}
		known[name] = proseFigures{min(is.pronouns, bound.pronouns), min(is.openings, bound.openings),
			min(is.banned, bound.banned), min(is.errors, bound.errors)}
		if k := known[name]; k.pronouns <= proseGoal.pronouns && k.openings+k.banned+k.errors == 0 {
			delete(known, name) // held to the goal from now on
		}
	}
	maps.DeleteFunc(known, func(name string, _ proseFigures) bool { return all[name] == nil })
	if *lowerProse {
		writeProse(t, known)
	}
}

func TestProseIsMeasured(t *testing.T) {
	var p prose
	p.add("The importer restarts unfinished transfers. Of those it tells nobody.\nWhat is made anew was told of.")
	if want := (prose{words: 17, pronouns: 4, openings: 2, banned: 2}); p != want {
		t.Errorf("measured %+v, want %+v", p, want)
	}
}

func TestProseOfMessagesIsMeasured(t *testing.T) {
	for name, c := range map[string]struct {
		code             string
		banned, openings int
	}{
		"plain":         {`var _ = errors.New("volume data: the copy failed: the disk is full")`, 0, 0},
		"error":         {`var _ = errors.New("the volume goes on, its copy is made anew")`, 2, 0},
		"help":          {`var _ = command{Long: "Removes the disk.\nIt goes when its data is there."}`, 2, 0},
		"joined":        {`var _ = fmt.Errorf("a merge is under "+"way: %w", err)`, 1, 0},
		"not joined":    {`var _ = "a merge is under " + name + " way"`, 0, 0},
		"operand":       {`var _ = name("it is on its way") + "x"`, 1, 0},
		"field":         {"type _ struct { A int `json:\"anew\" yaml:\"at last\"` }", 0, 0},
		"name and path": {`var _ = []string{"anew", "/dev/anew", "what"}`, 0, 0},
		"comment":       {"// A copy is told of, and made whole, at last.\nvar _ int", 3, 0},
		"no object":     {`var _ = errors.New("the volume loses what was written, and keeps what the disk says")`, 1, 0},
		"no actor":      {`var _ = "nobody has the copy; whoever reads the one that counts waits"`, 3, 1},
		"there":         {`var _ = "volume data: there is no room"`, 1, 0},
		"opening":       {`var _ = "volume data: what the disk holds stays; where none is, who knows. Of two one wins"`, 0, 3},
		"first word":    {`var _ = flag("where the server answers")`, 0, 1},
		"middle":        {`var _ = "the node of the volume, where the disk is, and those of\nwhat sources exist"`, 0, 0},
	} {
		var p prose
		p.addFile(t, name+".go", "package p\n"+c.code)
		if p.banned != c.banned || p.openings != c.openings {
			t.Errorf("%s: %d banned phrases and %d openings, want %d and %d", name, p.banned, p.openings, c.banned, c.openings)
		}
	}
}
