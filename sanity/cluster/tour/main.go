// Command tour is the story of a volume with three replicas on three machines: a machine dies under load and returns, a
// process dies, and in the end the machine of the volume's user dies.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/sanity/cluster"
)

func main() {
	cluster.Init()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "tour:", err)
		os.Exit(1)
	}
}

const (
	volume  = "data"
	size    = 512 << 20
	patient = 2 * time.Minute
)

type tour struct {
	*cluster.Cluster
	bin   string
	began time.Time
	load  *cluster.Load
	stop  context.CancelFunc
	ended chan error
}

func (t *tour) say(format string, args ...any) {
	fmt.Fprintf(os.Stdout, "%6.1f s  %s\n", time.Since(t.began).Seconds(), fmt.Sprintf(format, args...))
}

func run() (err error) {
	bin := flag.String("drover", "bin/drover", "the program")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	path, err := filepath.Abs(*bin)
	if err != nil {
		return err
	}
	t := &tour{bin: path, began: time.Now(), load: cluster.NewLoad(size, 128<<20)}
	t.Cluster, err = cluster.Start(ctx, cluster.Options{Binary: path, Nodes: 3, Log: os.Stderr})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.halt(), t.Close()) }()
	t.say("three machines with a disk each, and one that controls them: each with its own network and processes")
	return t.story(ctx)
}

func (t *tour) story(ctx context.Context) error {
	one, two, three := t.Nodes[0], t.Nodes[1], t.Nodes[2]
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 3}}
	v.Name = volume
	if err := t.Objects.Create(ctx, v); err != nil {
		return err
	}
	if _, err := t.whole(ctx, 3); err != nil {
		return err
	}
	t.say("volume %s: three replicas, one on each machine", volume)
	if err := t.attach(ctx, one); err != nil {
		return err
	}
	t.say("attached on %s; verified load begins: every block says which write it is", one.Name)
	if err := t.progress(ctx, 500); err != nil {
		return err
	}

	wrote := t.load.Writes()
	t.say("power of %s is cut", three.Name)
	if err := three.PowerOff(); err != nil {
		return err
	}
	was := time.Now()
	if _, err := t.whole(ctx, 2); err != nil {
		return err
	}
	if err := t.progress(ctx, 500); err != nil {
		return err
	}
	t.say("its replica was dropped from the members, writes continue; longest request so far %v", t.load.Worst().Round(
		time.Millisecond))
	if err := errors.Join(three.PowerOn(), three.Serve(ctx)); err != nil {
		return err
	}
	t.say("%s is back, after %d writes that it missed", three.Name, t.load.Writes()-wrote)
	if _, err := t.whole(ctx, 3); err != nil {
		return err
	}
	t.say("whole again, %.1f s after the cut", time.Since(was).Seconds())

	if err := one.Kill("data"); err != nil {
		return err
	}
	if err := t.progress(ctx, 500); err != nil {
		return err
	}
	t.say("kill -9 of the data process on %s: I/O continues; longest request so far %v", one.Name,
		t.load.Worst().Round(time.Millisecond))
	if err := t.halt(); err != nil {
		return err
	}
	t.say("%d writes, no I/O error, every read returned written data", t.load.Writes())

	if err := one.PowerOff(); err != nil {
		return err
	}
	t.say("power of %s, the node of the attached volume, is cut", one.Name)
	if err := t.command(ctx, "volume", "detach", volume, "--force", "--timeout", "2m"); err != nil {
		return err
	}
	if err := t.attach(ctx, two); err != nil {
		return err
	}
	t.say("attached on %s", two.Name)
	if err := t.progress(ctx, 200); err != nil {
		return err
	}
	if err := t.halt(); err != nil {
		return err
	}
	t.say("every acknowledged write exists")
	return nil
}

// attach attaches the volume on a machine, verifies all blocks, and starts the load.
func (t *tour) attach(ctx context.Context, m *cluster.Machine) error {
	if err := t.command(ctx, "volume", "attach", volume, "--node", m.Name, "--timeout", "2m"); err != nil {
		return err
	}
	var a api.Attachment
	if err := t.Objects.Get(ctx, client.ObjectKey{Name: volume}, &a); err != nil {
		return err
	}
	if err := t.load.Verify(a.Status.Device, false); err != nil {
		return err
	}
	ctx, t.stop = context.WithCancel(ctx)
	t.ended = make(chan error, 1)
	go func() { t.ended <- t.load.Run(ctx, a.Status.Device) }() // halt waits for it
	return nil
}

// halt ends the load and returns its error.
func (t *tour) halt() error {
	if t.stop == nil {
		return nil
	}
	t.stop()
	t.stop = nil
	return <-t.ended
}

// progress returns when the load has made n more writes.
func (t *tour) progress(ctx context.Context, n int64) error {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for until := t.load.Writes() + n; t.load.Writes() < until; {
		select {
		case <-tick.C:
		case err := <-t.ended:
			t.stop = nil
			return err
		case <-ctx.Done():
			return fmt.Errorf("no I/O for %v", t.load.Idle())
		}
	}
	return nil
}

// whole waits until the volume has n members.
func (t *tour) whole(ctx context.Context, n int) (*api.Volume, error) {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	v, err := await.Until(ctx, t.Objects, volume, func(v *api.Volume) (bool, error) {
		return len(v.Status.Members) == n, nil
	})
	if err != nil {
		return nil, fmt.Errorf("volume %s does not get %d members: %w", volume, n, err)
	}
	return v, nil
}

func (t *tour) command(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, t.bin, append(args, "--kubeconfig", t.Kubeconfig)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("drover %v: %w: %s", args, err, out)
	}
	return nil
}
