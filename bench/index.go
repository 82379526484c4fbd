package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

var ofHeap = regexp.MustCompile(`([0-9.]+) MiB of heap`)

// index measures the index of a volume of 1 TiB by the test that simulates such volumes, without a disk of such a size.
func (b *bench) index(ctx context.Context) error {
	const test = "TestIndexMemory"
	out, err := runTool(ctx, "go", "test", "-json", "-count=1", "-run", "^"+test+"$", "./replicas/stack")
	if err != nil {
		return err
	}
	found := false
	for s := bufio.NewScanner(strings.NewReader(out)); s.Scan(); {
		var line struct{ Test, Output string }
		if err := json.Unmarshal(s.Bytes(), &line); err != nil {
			return fmt.Errorf("go test: %w: %s", err, s.Text())
		}
		m := ofHeap.FindStringSubmatch(line.Output)
		if m == nil {
			continue
		}
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return err
		}
		found = true
		subject := strings.ReplaceAll(strings.TrimPrefix(line.Test, test+"/"), "_", " ")
		b.addFigure("index-of-1-TiB", subject, v, "MiB", "", 0, "simulated")
	}
	if !found {
		return fmt.Errorf("%s prints no figure of memory", test)
	}
	return nil
}
