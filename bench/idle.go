package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// idleAfter is the time until an idle process has settled; idleFor is the duration of the measurement of CPU time.
const (
	idleAfter = 35 * time.Second
	idleFor   = 30 * time.Second
)

// attached is the number of volumes attached in the end.
const attached = 100

// idle measures a `drover serve` without requests: fresh, after bursts of short-lived volumes, and with many attached
// volumes. The figures are sums over the three processes.
func (b *bench) idle(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(b.options.dir, "drover-idle.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	began := time.Now()
	in, err := startInstance(ctx, b.drover, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.stop()) }()
	b.addFigure("serve", "start", time.Since(began).Seconds(), "s", "", 0, "empty folder; until its disk is ready")
	if err := b.atRest(ctx, in, "fresh"); err != nil {
		return err
	}
	bursts := []int{100}
	if b.long {
		bursts = []int{20, 100}
	}
	for _, n := range bursts {
		g, burst := errgroup.WithContext(ctx)
		g.SetLimit(8)
		for i := range n {
			g.Go(func() error { return in.comeAndGo(burst, fmt.Sprintf("burst-%d-%d", n, i)) })
		}
		if err := g.Wait(); err != nil {
			return err
		}
		if err := b.atRest(ctx, in, fmt.Sprintf("after %d volumes", n)); err != nil {
			return err
		}
	}
	g, all := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i := range attached {
		g.Go(func() error {
			_, err := in.attachNew(all, fmt.Sprintf("attached-%d", i), "", 1<<30)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return b.atRest(ctx, in, fmt.Sprintf("with %d attached", attached))
}

// comeAndGo creates a volume, attaches the volume, writes, and deletes the volume.
func (in *instance) comeAndGo(ctx context.Context, name string) error {
	dev, err := in.attachNew(ctx, name, "", 1<<30)
	if err != nil {
		return err
	}
	if err := fillDevice(dev, 8<<20, 8<<20); err != nil {
		return err
	}
	return in.deleteVolume(ctx, name)
}

// atRest waits until an instance is idle and records its memory and CPU time.
func (b *bench) atRest(ctx context.Context, in *instance, subject string) error {
	if err := sleep(ctx, idleAfter); err != nil {
		return err
	}
	pids, err := in.processes()
	if err != nil {
		return err
	}
	before, err := ticks(pids)
	if err != nil {
		return err
	}
	if err := sleep(ctx, idleFor); err != nil {
		return err
	}
	after, err := ticks(pids)
	if err != nil {
		return err
	}
	rss, pss, err := resident(pids)
	if err != nil {
		return err
	}
	b.addFigure("serve-idle-rss", subject, float64(rss)/1024, "MiB", "", 0, "sum of its three processes")
	b.addFigure("serve-idle-pss", subject, float64(pss)/1024, "MiB", "", 0, "shared pages counted once")
	const hz = 100 // USER_HZ, the same on every architecture of Go
	b.addFigure("serve-idle-cpu", subject, 100*float64(after-before)/hz/idleFor.Seconds(), "% of a core", "", 0, "")
	return nil
}

// awaitIdle waits until the data process has no background work.
func (in *instance) awaitIdle(ctx context.Context) error {
	pid, err := in.pid("data")
	if err != nil {
		return err
	}
	return awaitQuiet(ctx, pid)
}

// awaitQuiet waits until a process uses less than a tenth of a core for two seconds.
func awaitQuiet(ctx context.Context, pid int) error {
	var last int64
	for quiet := 0; quiet <= 4; quiet++ {
		now, err := ticks([]int{pid})
		if err != nil {
			return err
		}
		if now-last > 5 { // hundredths of a second in half a second
			quiet = 0
		}
		last = now
		if err := sleep(ctx, 500*time.Millisecond); err != nil {
			return fmt.Errorf("process %d never is idle: %w", pid, err)
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// processes returns the pids of serve and its children.
func (in *instance) processes() ([]int, error) {
	pids := []int{in.cmd.Process.Pid}
	for _, role := range []string{"data", "hold"} {
		pid, err := in.pid(role)
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// ticks returns the CPU time of processes.
func ticks(pids []int) (sum int64, err error) {
	for _, p := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
		if err != nil {
			return 0, err
		}
		_, rest, _ := strings.Cut(string(raw), ") ")
		f := strings.Fields(rest)
		if len(f) < 13 {
			return 0, fmt.Errorf("/proc/%d/stat: %q", p, raw)
		}
		var user, system int64
		if _, err := fmt.Sscan(f[11]+" "+f[12], &user, &system); err != nil {
			return 0, err
		}
		sum += user + system
	}
	return sum, nil
}

// resident returns the memory of processes in KiB: rss counts shared pages for each process, pss divides shared pages
// among the processes.
func resident(pids []int) (rss, pss int64, err error) {
	for _, p := range pids {
		f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", p))
		if err != nil {
			return 0, 0, err
		}
		for s := bufio.NewScanner(f); s.Scan(); {
			var name string
			var kib int64
			if n, _ := fmt.Sscan(s.Text(), &name, &kib); n != 2 {
				continue
			}
			switch name {
			case "Rss:":
				rss += kib
			case "Pss:":
				pss += kib
			}
		}
		_ = f.Close()
	}
	return rss, pss, nil
}
