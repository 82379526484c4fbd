package main

import (
	"fmt"
	"path"
	"slices"
)

// goal bounds a figure: its ratio, its value, or the difference to the baseline's value. Name and subject are patterns
// of path.Match.
type goal struct {
	name, subject string
	to            string // the baseline; empty: any
	of            measure
	least, most   float64
}

type measure int

const (
	ratio measure = iota
	value
	over // above the baseline's value
)

const loopDirect = "loop-direct"

var goals = []goal{
	{name: "rand*-4k-qd32", subject: "drover-*", to: loopDirect, least: 0.6},
	{name: "read-1m", subject: "drover-*", to: loopDirect, least: 0.9},
	{name: "write-1m", subject: "drover-*", to: loopDirect, least: 0.9},
	{name: "rand*-4k-qd1-added", subject: "drover-*", to: loopDirect, of: value, most: 75},
	{name: "image-import-raw", subject: "drover", least: 0.8},
	{name: "image-import-raw-synced", subject: "drover", least: 0.8},
	{name: "image-import-qcow2-plain", subject: "drover", least: 1},
	{name: "image-import-qcow2-zlib", subject: "drover", least: 1},
	{name: "image-import-qcow2-zstd", subject: "drover", least: 1},
	{name: "image-import-gz", subject: "drover", least: 0.91},
	{name: "image-import-xz", subject: "drover", least: 0.91},
	{name: "image-import-zst", subject: "drover", least: 0.91},
	{name: "image-import-*-du", subject: "drover", most: 1.05},
	{name: "image-download", subject: "drover", least: 0.9},
	{name: "images-many", subject: "* beside *", most: 1.5},
	{name: "volume-from-image", subject: "*", of: value, most: 0.3},
	{name: "serve", subject: "start", of: value, most: 5},
	{name: "serve-idle-rss", subject: "fresh", of: value, most: 150},
	{name: "serve-idle-rss", subject: "after *", of: value, most: 150},
	{name: "serve-idle-cpu", subject: "fresh", of: value, most: 1},
	{name: "serve-idle-cpu", subject: "after *", of: value, most: 1},
	{name: "killed-to-next-io", subject: "*", of: value, most: 0.1},
	{name: "clone", subject: "of-*", of: value, most: 0.3},
	{name: "full-copy", subject: "drover", least: 0.9},
	{name: "index-of-1-TiB", subject: "*, fully written*", of: value, most: 64},
	{name: "snapshot-pause*-p99", subject: "added by a cut", of: over, most: 10},
	{name: "read-over-chain", subject: "*", least: 0.95},
	{name: "rebuild-full-dense", subject: "drover", least: 0.8},
	{name: "rebuild-full-fragmented", subject: "drover", least: 1},
	{name: "rebuild-100-empty-snapshots", subject: "added", of: value, most: 1},
	{name: "backup-first", subject: "drover", to: "cp, sync, SHA-256", most: 1.3},
	{name: "backup-first-2-gib", subject: "drover", of: value, most: 3.5},
	{name: "backup-first-to-restic", subject: "drover", to: "restic", most: 1},
	{name: "backup-first-read", subject: "* restore: first byte", of: value, most: 3},
	{name: "backup-first-file", subject: "restored volume: attached", of: value, most: 3},
	{name: "backup-first-file", subject: "restored volume: first file", of: value, most: 1},
	{name: "backup-first-file", subject: "mounted backup: first file", of: value, most: 10},
	{name: "backup-attach", subject: "during the backup", of: value, most: 2},
	{name: "backup-incremental-requests", subject: "*", of: over, most: 30},
	{name: "backup-sweep", subject: "deletion to free space", of: value, most: 60},
	{name: "backup-restore", subject: "drover", to: "cp, sync", least: 0.8},
	{name: "backup-shared-bytes", subject: "second *", most: 0.02},
	{name: "backup-incremental-bytes", subject: "1 % changed", most: 1.1},
	{name: "backup-day-bytes", subject: "day 2", of: value, most: 190},
	{name: "backup-day-bytes", subject: "day 3", of: value, most: 190},
	{name: "backup-guest-*", subject: "during full backups", least: 0.8},
	{name: "backup-rss", subject: "*", of: value, most: memoryBudget + 64},
	{name: "backups-found", subject: "newest", of: value, most: 10},
	{name: "rebuild-delta-bytes", subject: "3-replicas", most: 1.2},
}

// text formats the goal for people.
func (g goal) text() string {
	sign, v := ">=", g.least
	if g.most > 0 {
		sign, v = "<=", g.most
	}
	switch g.of {
	case ratio:
		return fmt.Sprintf("ratio %s %g", sign, v)
	case over:
		return fmt.Sprintf("%s baseline + %g", sign, v)
	default:
		return fmt.Sprintf("%s %g", sign, v)
	}
}

// hasGoal reports whether a goal names the figure.
func hasGoal(name string) bool {
	return slices.ContainsFunc(goals, func(g goal) bool { return g.name == name })
}

// judgeGoal records the goal of a figure, and a miss.
func (r *result) judgeGoal() {
	for _, g := range goals {
		name, err := path.Match(g.name, r.Name)
		subject, serr := path.Match(g.subject, r.Subject)
		if err != nil || serr != nil || !name || !subject || g.to != "" && g.to != r.Baseline {
			continue
		}
		v := r.Value
		switch g.of {
		case ratio:
			if r.Baseline == "" {
				continue
			}
			v = r.Ratio
		case over:
			v -= r.base
		}
		r.Goal = g.text()
		r.Missed = g.least > 0 && v < g.least || g.most > 0 && v > g.most
	}
}
