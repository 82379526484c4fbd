// Command bench compares Drover with the machine's own means: a plain file, the kernel's loop device with direct I/O on
// the file, cp and qemu-img. All subjects take turns on the same disk, so that a noisy machine disturbs all subjects
// alike; figures are medians. bench runs its own `drover serve` in a temporary folder and removes all its files.
//
// The figures of volumes hold for the mode of the kill test: Drover has no other mode.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

type options struct {
	drover, out, dir string
	sizeMiB          int64
	rounds, seconds  int
	objects, snaps   int
	stored           int
	only             string
	long             bool
}

func main() {
	var o options
	flag.StringVar(&o.drover, "drover", "bin/drover", "the binary to measure")
	flag.StringVar(&o.out, "out", "bench/out.json", "file for the figures")
	flag.StringVar(&o.dir, "dir", "/var/tmp", "folder on the disk to measure on")
	flag.Int64Var(&o.sizeMiB, "size", 512, "MiB per subject")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds of each figure; the median counts")
	flag.IntVar(&o.seconds, "seconds", 1, "seconds per round of the device figures")
	flag.IntVar(&o.objects, "objects", 300, "images, and volumes, beside which single operations are timed")
	flag.IntVar(&o.snaps, "snaps", 1000, "snapshots of one volume")
	flag.IntVar(&o.stored, "stored", 500, "backups of another cluster in a store")
	flag.BoolVar(&o.long, "long", false, "longer rounds and more of them: as "+
		"-size 1024 -rounds 5 -seconds 2 -objects 1000 -stored 10000")
	flag.StringVar(&o.only, "only", "", "measure only these, separated by commas: idle, index, devices, transport, "+
		"replication (or parts of it: members, cuts, kill, outage, rebuild), clones (or parts of it: linked, full-copy, "+
		"merge), images (or parts of it: download, volumes, scale, formats, or formats by name, as qcow2-zlib), "+
		"snapshots (or parts of it: pause, chains), backups (or the first backup and parts: incremental, restore, shared, "+
		"day, guest, sweep, first-read, first-file, bucket, found)")
	flag.Parse()
	if o.long {
		o.sizeMiB, o.rounds, o.seconds, o.objects = 1024, 5, 2, 1000
		o.stored = 10000
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := runBench(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func runBench(ctx context.Context, o options) (err error) {
	b := &bench{options: o}
	if err := b.checkOnly(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("block devices need root: sudo make bench")
	}
	if o.drover, err = filepath.Abs(o.drover); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(o.dir, "drover-bench.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	in, err := startInstance(ctx, o.drover, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.stop()) }()
	b = &bench{options: o, dir: dir, in: in, loadBefore: loadAverage()}
	err = b.measureAll(ctx)
	if len(b.results) > 0 { // figures from before an error count too
		b.printReport(os.Stdout)
	}
	return errors.Join(err, b.writeReport(o.out))
}

// sectionTime bounds a section: a stalled section fails.
const sectionTime = 15 * time.Minute

// measureAll measures the sections in order. measureAll reports failures at the end, and continues after a failed
// section.
func (b *bench) measureAll(ctx context.Context) error {
	var errs []error
	for _, s := range b.sections() {
		if !b.isWanted(append(s.parts, s.name)...) {
			continue
		}
		b.section = s.name
		limit := sectionTime
		if b.long {
			limit *= 4
		}
		limited, cancel := context.WithTimeout(ctx, limit)
		name := s.name
		if len(s.parts) == 1 {
			name += " " + s.parts[0]
		}
		fmt.Fprintln(os.Stderr, name, "...")
		began := time.Now()
		err := s.measure(limited)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			fmt.Fprintln(os.Stderr, "failed:", errs[len(errs)-1])
		}
		if ctx.Err() != nil {
			break
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", name, time.Since(began).Round(time.Second))
	}
	return errors.Join(errs...)
}

// bench is a run and its figures.
type bench struct {
	options
	dir     string
	in      *instance
	section string // the current section
	results []result

	loadBefore       float64
	copied, loopback float64 // MB/s of cp and of the transport, the baselines of a rebuild
}
