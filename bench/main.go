// Command bench measures Drover side by side with what the machine can do without it: a plain file, the kernel's loop
// device with direct I/O on that file, cp and qemu-img. Rounds of all subjects are interleaved on one disk, so that a
// noisy machine is noisy for everybody; figures are medians. It runs an own `drover serve` in a temporary folder and
// leaves nothing behind.
//
// The figures of the volumes are those of the mode that the kill test runs in: there is only one.
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
)

type options struct {
	drover, out, dir string
	sizeMiB          int64
	rounds, seconds  int
	objects          int
	only             string
}

func main() {
	var o options
	flag.StringVar(&o.drover, "drover", "bin/drover", "the binary to measure")
	flag.StringVar(&o.out, "out", "bench/out.json", "where to write the figures")
	flag.StringVar(&o.dir, "dir", "/var/tmp", "folder on the disk to measure on")
	flag.Int64Var(&o.sizeMiB, "size", 1024, "MiB per subject")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds of each figure; the median counts")
	flag.IntVar(&o.seconds, "seconds", 2, "seconds per round of the device figures")
	flag.IntVar(&o.objects, "objects", 1000, "images, and volumes, beside which single operations are timed")
	flag.StringVar(&o.only, "only", "", "devices, images or scale: measure only these")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
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
	in, err := start(ctx, o.drover, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.stop()) }()
	b := &bench{options: o, dir: dir, in: in}
	if o.only == "" || o.only == "images" {
		if err := b.images(ctx); err != nil {
			return err
		}
	}
	if o.only != "devices" {
		if err := b.scale(ctx, o.objects); err != nil {
			return err
		}
	}
	if o.only == "" || o.only == "devices" {
		if err := b.devices(ctx); err != nil {
			return err
		}
	}
	b.print(os.Stdout)
	return b.write(o.out)
}

// bench is one run and what it found.
type bench struct {
	options
	dir     string
	in      *instance
	results []result
}
