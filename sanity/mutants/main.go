// Command mutants removes one guard after another from the data path and demands that a test fails. The file guards.txt
// lists the guards, each with a snippet of the code, the replacement without the guard, and the tests to run. The
// command works on a copy of the repository in a temporary folder, with one goroutine. A snippet that does not match
// exactly once is an error: the code has changed, and the list must follow.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

func main() {
	only := flag.String("run", "", "a regular expression: the names of the guards to take out; empty: all")
	limit := flag.Duration("limit", 5*time.Minute, "time for the tests of one guard; a test that hangs has noticed")
	out := flag.String("out", "", "a file that the table is written to as well")
	trust := flag.Bool("trust", false, "do not run the tests with their guards first: they pass")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *only, *limit, *out, *trust); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, only string, limit time.Duration, out string, trust bool) error {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	all, err := readGuards("sanity/mutants/guards.txt")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := copyTree(ctx, dir); err != nil {
		return err
	}
	table := &strings.Builder{}
	fmt.Fprint(table, "| guard | package | noticed by |\n|---|---|---|\n")
	survived, broken := 0, 0
	for _, g := range all {
		if !wanted.MatchString(g.name) || ctx.Err() != nil {
			continue
		}
		began := time.Now()
		by, err := g.takeOut(ctx, dir, limit, trust)
		switch {
		case err != nil:
			broken++
			by = "error: " + err.Error()
		case by == "":
			survived++
			by = "NOTHING"
		}
		fmt.Printf("%-55s %-50s %v\n", g.name, by, time.Since(began).Round(time.Second))
		fmt.Fprintf(table, "| %s | `%s` | %s |\n", g.name, filepath.Dir(g.file), by)
		if out != "" {
			if err := os.WriteFile(out, []byte(table.String()), 0o644); err != nil {
				return err
			}
		}
	}
	if survived+broken > 0 {
		return fmt.Errorf("no test noticed %d guards, and %d could not be tried", survived, broken)
	}
	return ctx.Err()
}

// copyTree copies the files of the repository, uncommitted files included.
func copyTree(ctx context.Context, dir string) error {
	cmd := exec.CommandContext(ctx, "sh", "-ec",
		`git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$1"`,
		"sh", dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("copy of the repository: %w", err)
	}
	return nil
}

// takeOut runs the tests of a guard without the guard, restores the file, and returns the test that failed, if any.
func (g *guard) takeOut(ctx context.Context, dir string, limit time.Duration, trust bool) (by string, err error) {
	name := filepath.Join(dir, g.file)
	was, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	without, err := g.replace(was)
	if err != nil {
		return "", err
	}
	if !trust {
		if by, said, err := g.test(ctx, dir, limit); err != nil || by != "" {
			return "", fmt.Errorf("tests of guard %q: they fail with the guard in place (%s): %w\n%s", g.name, by, err, said)
		}
	}
	if err := os.WriteFile(name, without, 0o644); err != nil {
		return "", err
	}
	defer func() {
		if werr := os.WriteFile(name, was, 0o644); err == nil {
			err = werr
		}
	}()
	by, _, err = g.test(ctx, dir, limit)
	return by, err
}

var failed = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// test runs the tests and names the first one that failed.
func (g *guard) test(ctx context.Context, dir string, limit time.Duration) (by, said string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*limit) // to compile, too
	defer cancel()
	args := []string{"test", "-vet=off", "-count=1", "-failfast", "-timeout", limit.String(),
		"-run", "^(" + g.run + ")$", "./" + g.pkg}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.WaitDelay = dir, time.Minute
	raw, err := cmd.CombinedOutput()
	said = string(raw)
	switch m := failed.FindStringSubmatch(said); {
	case ctx.Err() != nil:
		return "", said, ctx.Err()
	case strings.Contains(said, "[build failed]") || strings.Contains(said, "[setup failed]"):
		return "", said, fmt.Errorf("the code without the guard does not compile: %s", said)
	case strings.Contains(said, "no tests to run"):
		return "", said, fmt.Errorf("test %s does not exist in %s", g.run, g.pkg)
	case err == nil:
		return "", said, nil
	case m != nil:
		return m[1], said, nil
	case strings.Contains(said, "panic: test timed out"):
		return g.run + " (hangs)", said, nil
	}
	return g.run + " (ends the process)", said, nil
}
