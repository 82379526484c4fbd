package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// section is a part of the bench. -only selects a section by its name or the name of a part.
type section struct {
	name    string
	parts   []string
	measure func(context.Context) error
}

func (b *bench) sections() []section {
	formats := []string{"formats"}
	for _, f := range samples {
		formats = append(formats, f.name)
	}
	return []section{
		{"idle", nil, b.idle},
		{"index", nil, b.index},
		{"devices", nil, b.devices},
		{"transport", nil, b.transport},
		{"clones", []string{"linked"}, b.linked},
		{"clones", []string{"full-copy"}, b.fullCopy},
		{"clones", []string{"merge"}, b.merge},
		{"images", formats, func(ctx context.Context) error { return b.formats(ctx, 2*b.sizeMiB<<20) }},
		{"images", []string{"download"}, b.downloads},
		{"images", []string{"volumes"}, b.fromImage},
		{"images", []string{"scale"}, func(ctx context.Context) error { return b.scale(ctx, b.objects) }},
		{"snapshots", []string{"pause", "chains"}, b.snapshots},
		{"backups", backupParts, b.backups},
		{"backups", []string{"first-read"}, b.firstRead},
		{"backups", []string{"first-file"}, b.firstFile},
		{"backups", []string{"bucket"}, b.bucketBackups},
		{"backups", []string{"found"}, func(ctx context.Context) error { return b.found(ctx, b.stored) }},
		// Last, because the section stops its nodes.
		{"replication", []string{"members", "cuts", "kill", "outage", "rebuild"}, b.replication},
	}
}

// backupParts are the parts of the section backups, after the first backups that all of them need.
var backupParts = []string{"incremental", "restore", "shared", "day", "guest", "sweep"}

// isWanted reports whether -only selects a name.
func (b *bench) isWanted(names ...string) bool {
	return b.only == "" || slices.ContainsFunc(strings.Split(b.only, ","), func(n string) bool {
		return slices.Contains(names, n)
	})
}

// checkOnly refuses an unknown name in -only.
func (b *bench) checkOnly() error {
	if b.only == "" {
		return nil
	}
	var names []string
	for _, s := range b.sections() {
		names = append(append(names, s.name), s.parts...)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	for _, n := range strings.Split(b.only, ",") {
		if !slices.Contains(names, n) {
			return fmt.Errorf("-only: no measurement is named %q; the measurements are: %s", n, strings.Join(names, ", "))
		}
	}
	return nil
}
