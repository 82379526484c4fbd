package recover

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/driver/cli"
	"drover.io/drover/replicas/stack"
)

// disk is a disk with its records.
type disk struct {
	*stack.Disk
	node   string // serves the disk now
	images []block.Image
	reps   []stack.Meta
}

func (d *disk) uid() api.UID { return api.UID(d.UID()) }

// readDisks opens the disks and reads their records. A disk without a node becomes a conflict, because no node would
// serve the recovered objects.
func (j *job) readDisks() error {
	paths := j.options.Disks
	named := len(paths) > 0
	if !named {
		for _, n := range j.nodes {
			for _, d := range n.Status.Disks {
				if d.UID != "" && !slices.Contains(paths, d.Path) {
					paths = append(paths, d.Path)
				}
			}
		}
	}
	j.paths = paths
	seen := map[api.UID]*disk{}
	for _, path := range paths {
		path, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		on, err := stack.Open(path)
		if api.Is(err, api.NotFound) && !named {
			continue // the disk of another machine or an unmounted disk: its node reports the state
		}
		if err != nil {
			j.addStep(step{Finding: cli.Finding{Kind: "Disk", Name: path, Disk: path, State: cli.FoundDamaged,
				Note: err.Error()}})
			continue
		}
		d := &disk{Disk: on}
		f := cli.Finding{Kind: "Disk", Name: path, UID: d.uid(), Disk: path}
		var why string
		d.node, why = j.nodeOf(d)
		if was := seen[d.uid()]; was != nil {
			if was.Path() == path {
				continue
			}
			why = fmt.Sprintf("%s has the same uid: one is a copy of the other, take it away", was.Path())
			j.disks = slices.DeleteFunc(j.disks, func(o *disk) bool { return o == was })
		}
		seen[d.uid()] = d
		if why != "" {
			f.State, f.Note = cli.FoundConflict, why
			j.addStep(step{Finding: f})
			continue
		}
		f.State, f.Note = cli.FoundThere, "on node "+d.node
		j.addStep(step{Finding: f})
		j.readRecords(d)
		j.disks = append(j.disks, d)
	}
	if len(seen) == 0 {
		return api.Errorf(api.NotFound, "no disk of Drover was found here: start `drover serve --disk PATH` on the machine "+
			"that has it, or name it with --disk")
	}
	return nil
}

// nodeOf returns the node that serves a disk now. The report of a silent or dead node counts only if no other node
// reports the disk, because the disk may have moved from a dead machine to another. The user declares nodes dead.
func (j *job) nodeOf(d *disk) (node, why string) {
	var ready, past []string
	here := map[string]bool{}
	for _, n := range j.nodes {
		for _, s := range n.Status.Disks {
			if s.UID != d.uid() || !s.Ready {
				continue
			}
			if slices.Contains(j.options.DeadNodes, n.Name) || time.Since(n.Status.Heartbeat.Time) > n.SilentAfter() {
				past = append(past, n.Name)
			} else {
				ready = append(ready, n.Name)
			}
			here[n.Name] = here[n.Name] || s.Path == d.Path()
		}
	}
	if len(ready) == 0 {
		ready = past
	}
	if len(ready) == 1 && here[ready[0]] {
		node = ready[0]
	}
	switch {
	case len(ready) == 0:
		return "", "no node has it: add it with `drover disk add " + d.Path() + "`, then recover"
	case len(ready) > 1:
		return "", fmt.Sprintf("nodes %s say that it is theirs: one has a copy of it", strings.Join(ready, " and "))
	case node == "":
		return "", fmt.Sprintf("node %s has it at another path: name that path", ready[0])
	}
	return node, ""
}

// readRecords reads the images and stacks of the disk. Unreadable records become findings; the others count.
func (j *job) readRecords(d *disk) {
	damaged := func(kind, name string, uid api.UID, err error) {
		j.addStep(step{Finding: cli.Finding{Kind: kind, Name: name, UID: uid, Disk: d.Path(), State: cli.FoundDamaged,
			Note: err.Error()}})
	}
	images, err := d.Images()
	if err != nil {
		damaged("BackingImage", "(unreadable)", "", err)
	}
	for _, img := range images {
		err := d.checkComplete(img)
		if err == nil {
			err = api.ValidateImageName(img.Name)
		}
		if err != nil {
			damaged("BackingImage", img.Name, api.UID(img.UID), err)
			continue
		}
		d.images = append(d.images, img)
	}
	reps, err := d.Replicas()
	if err != nil {
		damaged("Replica", "(unreadable)", "", err)
	}
	for _, m := range reps {
		if err := j.checkLayersExist(d, m.Layers); err != nil {
			damaged("Replica", replicaName(m.Volume, m.UID), api.UID(m.UID), err)
			continue
		}
		d.reps = append(d.reps, m)
	}
}

// checkLayersExist checks that each layer exists on the disk, or on another disk that serves reads until the copy is
// complete.
func (j *job) checkLayersExist(d *disk, layers []string) error {
	lacks, err := d.LackingOf(layers)
	for _, l := range layers {
		if !slices.Contains(lacks, l) {
			if _, _, err := d.LayerSize(l); err != nil {
				return err
			}
		}
	}
	for _, path := range j.paths {
		if err != nil || len(lacks) == 0 {
			return err
		}
		if on, oerr := stack.Open(path); oerr == nil {
			lacks, err = on.LackingOf(lacks)
		}
	}
	if err == nil && len(lacks) > 0 {
		err = api.Errorf(api.NotFound, "layer %s is on no disk of this machine", lacks[0])
	}
	return err
}

// checkComplete checks that the layers of an image are complete on the disk. A layer of a snapshot may get digests
// later.
func (d *disk) checkComplete(img block.Image) error {
	if img.Digest == "" {
		_, err := d.Taken(img)
		return err
	}
	for _, l := range img.Layers {
		if _, _, err := d.Digest(l); err != nil {
			return fmt.Errorf("layer %s: %w", l, err)
		}
	}
	return nil
}

func replicaName(volume, uid string) string { return volume + "." + uid[:min(8, len(uid))] }
