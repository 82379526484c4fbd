package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// guard is a line or a few lines of the code that a promise of the data path rests on.
type guard struct {
	name string
	file string // in the repository
	pkg  string // the package of the tests
	run  string // names of the tests, a regular expression
	old  string // lines of the code, without regard to indentation
	new  string // the replacement
}

// readGuards reads a list of blocks with an empty line between two blocks. A block has the lines "guard", "file" and
// "test" with values, and the changed lines after - and + as in a patch.
func readGuards(name string) (all []*guard, err error) {
	raw, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	for _, block := range strings.Split(string(raw), "\n\n") {
		g := &guard{}
		for _, line := range strings.Split(strings.Trim(block, "\n"), "\n") {
			key, value, _ := strings.Cut(line, " ")
			switch key {
			case "#", "":
			case "guard":
				g.name = value
			case "file":
				g.file = value
			case "test":
				g.pkg, g.run, _ = strings.Cut(value, " ")
			case "-":
				g.old += value + "\n"
			case "+":
				g.new += value + "\n"
			default:
				return nil, fmt.Errorf("%s: guard %q: line %q makes no sense", name, g.name, line)
			}
		}
		switch {
		case g.name == "" && g.old == "": // a comment
		case g.name == "" || g.file == "" || g.run == "" || g.old == "" || g.new == "":
			return nil, fmt.Errorf("%s: guard %q lacks a field", name, g.name)
		default:
			all = append(all, g)
		}
	}
	return all, nil
}

// replace is the text of the file without the guard.
func (g *guard) replace(text []byte) ([]byte, error) {
	var lines []string
	for _, line := range strings.Split(strings.TrimSpace(g.old), "\n") {
		lines = append(lines, regexp.QuoteMeta(strings.TrimSpace(line)))
	}
	is := regexp.MustCompile(strings.Join(lines, `\n\s*`)).FindAllIndex(text, -1)
	if len(is) != 1 {
		return nil, fmt.Errorf("guard %q: %s has the snippet %d times, not once; bring the list up to date", g.name,
			g.file, len(is))
	}
	at := is[0]
	return append(append(append([]byte{}, text[:at[0]]...), strings.TrimSpace(g.new)...), text[at[1]:]...), nil
}
