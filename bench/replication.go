package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// Three nodes on this machine, connected over loopback, serve the volumes with several replicas. All nodes share the
// machine's processors and disk, so several machines perform better.

var memberJobs = []job{
	{"randwrite-4k-qd1", "randwrite", "4k", "iops", 1},
	{"randwrite-4k-qd32", "randwrite", "4k", "iops", 32},
	{"write-1m", "write", "1m", "MB/s", 8},
	{"randread-4k-qd32", "randread", "4k", "iops", 32},
	{"read-1m", "read", "1m", "MB/s", 8},
}

// replication measures volumes with replicas on other nodes.
func (b *bench) replication(ctx context.Context) (err error) {
	fmt.Fprintln(os.Stderr, "two more nodes on this machine ...")
	var others []*other
	for _, name := range []string{"far-1", "far-2"} {
		o := &other{name: name, dir: filepath.Join(b.dir, name)}
		if err := os.MkdirAll(o.dir, 0o700); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, o.stopNode()) }()
		if err := o.startNode(ctx, b.in); err != nil {
			return err
		}
		others = append(others, o)
	}
	defer func() { err = errors.Join(err, b.deleteVolumes(others)) }() // before the nodes end: a detach needs the members
	var errs []error
	for _, part := range []struct {
		name string
		do   func(context.Context, []*other) error
	}{{"members", b.members}, {"cuts", b.cuts}, {"kill", b.kills}, {"outage", b.outage}, {"rebuild", b.rebuilds}} {
		if !b.isWanted("replication", part.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "replication: %s ...\n", part.name)
		if err := part.do(ctx, others); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", part.name, err))
		}
		if err := b.deleteVolumes(others); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
	return errors.Join(errs...)
}

// deleteVolumes deletes the volumes of a part, also after a failure.
func (b *bench) deleteVolumes(others []*other) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, o := range others {
		if o.cmd == nil {
			if err := o.startNode(ctx, b.in); err != nil {
				return err
			}
		}
	}
	var list api.VolumeList
	if err := b.in.client.List(ctx, &list); err != nil {
		return err
	}
	var errs []error
	for _, v := range list.Items {
		if strings.HasPrefix(v.Name, "r-") {
			errs = append(errs, b.in.deleteVolume(ctx, v.Name))
		}
	}
	return errors.Join(errs...)
}

// members measures I/O of volumes with one to three replicas, and of a plain file.
func (b *bench) members(ctx context.Context, _ []*other) error {
	plain := filepath.Join(b.dir, "plain-beside")
	if err := b.fillSubject(ctx, plain); err != nil {
		return err
	}
	defer func() { _ = os.Remove(plain) }()
	subjects := []subject{{"plain-file", plain}}
	for _, s := range []struct {
		name  string
		nodes []string
	}{{"1-local", []string{b.in.node}}, {"1-remote", []string{"far-1"}}, {"2-replicas", []string{b.in.node, "far-1"}},
		{"3-replicas", []string{b.in.node, "far-1", "far-2"}}} {
		dev, err := b.attachReplicated(ctx, "r-"+s.name, s.nodes, b.sizeMiB<<20)
		if err != nil {
			return err
		}
		if err := b.fillSubject(ctx, dev); err != nil {
			return err
		}
		subjects = append(subjects, subject{s.name, dev})
	}
	for _, j := range memberJobs {
		got, spent := map[string][]float64{}, map[string][]float64{}
		for range b.rounds {
			for _, s := range subjects {
				before := cpuSeconds()
				v, err := b.fio(ctx, j, s.path)
				if err != nil {
					return err
				}
				got[s.name] = append(got[s.name], v)
				ops := v * (float64(b.seconds) + ramp.Seconds())
				if j.unit == "MB/s" {
					ops *= 1e6 / (1 << 20)
				}
				spent[s.name] = append(spent[s.name], (cpuSeconds()-before)/ops*1e6)
			}
		}
		for _, s := range subjects {
			v, note := median(got[s.name]), ""
			if j.depth == 1 {
				note = fmt.Sprintf("%.0f us per I/O", 1e6/v)
			}
			b.addFigure("replication-"+j.name, s.name, v, j.unit, "1-local", median(got["1-local"]), note)
		}
		for _, s := range subjects {
			b.addFigure("replication-"+j.name+"-cpu", s.name, median(spent[s.name]), "us", "1-local", median(spent["1-local"]),
				"processor time of the whole machine per I/O, fio's among it")
		}
	}
	return nil
}

// attachReplicated creates a volume with a replica on each of the nodes and attaches the volume here.
func (b *bench) attachReplicated(ctx context.Context, name string, nodes []string, size int64) (string, error) {
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: int32(len(nodes)), Nodes: nodes}}
	v.Name = name
	if err := b.in.client.Create(ctx, v); err != nil {
		return "", err
	}
	if err := b.awaitMembers(ctx, name, len(nodes)); err != nil {
		return "", err
	}
	dev, err := b.in.attach(ctx, name)
	if err != nil {
		return "", err
	}
	return dev, b.awaitMembers(ctx, name, len(nodes))
}

// setNodes sets the nodes of a volume's replicas.
func (b *bench) setNodes(ctx context.Context, name string, nodes ...string) error {
	var v api.Volume
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: name}, &v); err != nil {
		return err
	}
	was := v.DeepCopy()
	v.Spec.NumberOfReplicas, v.Spec.Nodes = int32(len(nodes)), nodes
	return b.in.client.Patch(ctx, &v, client.MergeFrom(was))
}

// wholeTime bounds the wait for replicas.
const wholeTime = 3 * time.Minute

func (b *bench) awaitMembers(ctx context.Context, name string, n int) error {
	ctx, cancel := context.WithTimeout(ctx, wholeTime)
	defer cancel()
	_, err := await.Until(ctx, b.in.client, name, func(v *api.Volume) (bool, error) {
		return len(v.Status.Members) == n, nil
	})
	if err != nil {
		return fmt.Errorf("%d replicas of volume %s: %w", n, name, err)
	}
	return nil
}

// cpuSeconds returns the busy time of all processors since the boot.
func cpuSeconds() float64 {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	f := strings.Fields(strings.SplitN(string(raw), "\n", 2)[0])
	sum := 0.0
	for i, x := range f[1:] {
		if n, err := strconv.ParseFloat(x, 64); err == nil && i != 3 && i != 4 && i < 8 { // neither idle nor iowait
			sum += n
		}
	}
	return sum / 100
}
