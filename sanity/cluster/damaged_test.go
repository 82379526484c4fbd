package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestDamagedFiles: after any damage to the files of one replica of three, the volume is attached and becomes healthy
// again, and every node reads the right data. The volume is used on the replica's node, or on another node.
func TestDamagedFiles(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n1, n2 := c.Nodes[0], c.Nodes[1]
	l := newLoaded(t, c, "v", 64<<20, 3)
	l.attach(n1)
	l.works(1000)
	awaitVolume(t, c, "v", "healthy", whole)
	l.halt()
	c.detach(t, "v")
	heads := func(dir string) []string {
		files, err := filepath.Glob(filepath.Join(dir, "*.data"))
		must(t, err)
		if len(files) == 0 {
			t.Fatalf("no head in %s", dir)
		}
		return files
	}
	remove := func(name string) func(dir string) {
		return func(dir string) { must(t, os.Remove(filepath.Join(dir, name))) }
	}
	empty := func(dir string) { must(t, os.Truncate(filepath.Join(dir, "stack.json"), 0)) }
	type damage struct {
		name  string
		on    *Machine
		spoil func(dir string)
	}
	damages := []damage{
		{"record-empty-here", n1, empty},
		{"head-short-here", n1, func(dir string) {
			for _, f := range heads(dir) {
				must(t, os.Truncate(f, 4096))
			}
		}},
		{"intents-damaged", n2, func(dir string) {
			must(t, os.WriteFile(filepath.Join(dir, "intents"), make([]byte, 8192), 0o600))
		}},
		{"all-gone", n2, func(dir string) { must(t, os.RemoveAll(dir)) }},
	}
	if suite.All() {
		damages = append(damages, damage{"record-gone", n2, remove("stack.json")},
			damage{"record-gone-here", n1, remove("stack.json")}, damage{"record-empty", n2, empty},
			damage{"intents-gone", n2, remove("intents")},
			damage{"head-gone", n2, func(dir string) {
				for _, f := range heads(dir) {
					must(t, os.Remove(f))
				}
			}},
			damage{"zeros-gone", n2, func(dir string) {
				for _, f := range heads(dir) {
					must(t, os.Remove(strings.TrimSuffix(f, ".data")+".zero"))
				}
			}})
	}
	for _, x := range damages {
		t.Run(x.name, func(t *testing.T) {
			l.t = t
			r := replicasOf(t, c, "v")[x.on.Name]
			x.spoil(x.on.Disks[0].View("replicas", string(r.Spec.UID)))

			l.attach(n1)
			l.works(100)
			awaitVolume(t, c, "v", "healthy again", whole)
			l.works(100)
			l.halt()
			c.detach(t, "v")
			l.attach(x.on) // the node's own replica serves the reads
			l.works(100)
			l.halt()
			c.detach(t, "v")
			if now := replicasOf(t, c, "v")[x.on.Name]; now.Name != r.Name {
				t.Logf("%s took the place of %s", now.Name, r.Name)
			}
		})
	}
	l.t = t
	for _, m := range c.Nodes {
		l.attach(m)
		l.halt()
		c.detach(t, "v")
	}
}

// TestDamagedWhileUsed: the files of a replica are deleted while the volume works, and a kill hits the data process
// of the replica's node: the volume continues with the other members, and another replica takes the place.
func TestDamagedWhileUsed(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	l := newLoaded(t, c, "v", 64<<20, 3)
	l.attach(c.Nodes[0])
	awaitVolume(t, c, "v", "healthy", whole)
	for _, m := range []*Machine{c.Nodes[1], c.Nodes[0]} { // the last is the engine's own
		l.works(100)
		r := replicasOf(t, c, "v")[m.Name]
		dir := m.Disks[0].View("replicas", string(r.Spec.UID))
		eventually(t, "the files go, while others may come", func() bool { return os.RemoveAll(dir) == nil })
		l.works(100)
		must(t, m.Kill("data"))
		l.works(100)
		eventually(t, "another replica takes the place of "+r.Name, func() bool {
			now, is := replicasOf(t, c, "v")[m.Name]
			return is && now.Name != r.Name
		})
		awaitVolume(t, c, "v", "healthy again", whole)
	}
	l.works(100)
	l.halt()
	c.detach(t, "v")
	for _, m := range c.Nodes {
		l.attach(m)
		l.halt()
		c.detach(t, "v")
	}
}

// TestDamagedData: bytes of sealed layers change on one replica's disk. Another replica answers the reads, no member
// is dropped, and the layers are repaired, after a read or a scrub found the damage, attached or not. With damaged
// checksums another replica takes the place.
func TestDamagedData(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n1, n2 := c.Nodes[0], c.Nodes[1]
	l := newLoaded(t, c, "v", 32<<20, 3)
	l.attach(n1)
	l.works(3000)
	awaitVolume(t, c, "v", "healthy", whole)
	l.halt()
	for _, name := range []string{"s1", "s2"} {
		c.command(t, "snapshot", "create", "v", name)
		l.begin()
		l.works(100) // not much: new data must not hide the damage below
		l.halt()
	}
	layers := func(m *Machine) []string { return layersOf(t, c, "v", m) }
	spoil := func(dir string, holes bool) []byte { return spoilLayer(t, dir, holes) }
	repaired := func(m *Machine, dir string, right []byte) { awaitRepaired(t, c, "v", m, dir, right) }
	epoch := awaitVolume(t, c, "v", "healthy", whole).Status.Epoch
	was := replicasOf(t, c, "v")

	// Reads on the engine's node find the damage; the reads of the load all succeed.
	dir := layers(n1)[0]
	right := spoil(dir, false)
	must(t, l.load.Verify(l.device, false))
	repaired(n1, dir, right)
	// By a scrub, on another node.
	dir = layers(n2)[0]
	right = spoil(dir, true)
	c.scrub(t, "v")
	repaired(n2, dir, right)
	if v := awaitVolume(t, c, "v", "healthy", whole); v.Status.Epoch != epoch {
		t.Logf("the members changed meanwhile: epoch %d became %d", epoch, v.Status.Epoch)
		for _, why := range dropped(t, c, "v") { // a slow member is dropped, with or without damage
			if !strings.Contains(why, "no answer for") && !strings.Contains(why, "not reached for") &&
				!strings.Contains(why, "not answer") {
				t.Errorf("a replica was dropped: %s", why)
			}
		}
	}
	// By a scrub of the detached volume.
	c.detach(t, "v")
	for _, m := range []*Machine{n2, n1} {
		dir = layers(m)[1]
		right = spoil(dir, true)
		c.scrub(t, "v")
		repaired(m, dir, right)
	}
	for node, r := range replicasOf(t, c, "v") {
		if was[node].Name != r.Name {
			t.Errorf("%s took the place of %s", r.Name, was[node].Name)
		}
	}
	awaitVolume(t, c, "v", "intact", func(v *api.Volume) bool {
		return meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionIntact)
	})

	// The checksums are damaged, too.
	l.attach(n1)
	dir = layers(n2)[0]
	spoil(dir, true)
	must(t, corrupt(filepath.Join(dir, "sums"), 100, 8))
	c.scrub(t, "v", "was deleted meanwhile")
	awaitVolume(t, c, "v", "healthy without "+was[n2.Name].Name, func(v *api.Volume) bool {
		return whole(v) && !slices.Contains(v.Status.Members, was[n2.Name].Name)
	})
	l.works(100)
	l.halt()
	c.detach(t, "v")
	for _, m := range c.Nodes {
		l.attach(m)
		l.halt()
		c.detach(t, "v")
	}
}

// scrub compares a volume with its digests. The damage may be repaired before the scrub's report; a replica beyond
// repair may be deleted by then.
func (c *Cluster) scrub(t *testing.T, volume string, fine ...string) {
	t.Helper()
	out, err := c.try(t, "volume", "scrub", volume)
	said := func(what string) bool { return strings.Contains(out, what) }
	if err != nil && !slices.ContainsFunc(append(fine, "is damaged"), said) {
		t.Errorf("scrub of volume %s: %v: %s", volume, err, out)
	}
}

// TestDamagedSurvivor: the only remaining member is damaged at bytes that the returning replica has right. The member
// is repaired from the returning replica, which could not be resynced otherwise.
func TestDamagedSurvivor(t *testing.T) {
	c := start(t, Options{Nodes: 2})
	n1, n2 := c.Nodes[0], c.Nodes[1]
	l := newLoaded(t, c, "v", 32<<20, 2)
	both := func(v *api.Volume) bool {
		return v.Status.Robustness == api.RobustHealthy && len(v.Status.Members) == 2
	}
	l.attach(n1)
	l.works(3000)
	awaitVolume(t, c, "v", "healthy", both)
	l.halt()
	c.command(t, "snapshot", "create", "v", "s1")
	dir := layersOf(t, c, "v", n1)[0]
	layersOf(t, c, "v", n2)
	l.begin()
	must(t, n2.PowerOff())
	l.works(100) // not much: new data must not hide the damage below
	l.halt()
	awaitVolume(t, c, "v", "alone", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	was := replicasOf(t, c, "v")
	right := spoilLayer(t, dir, false)
	if err := l.load.Verify(l.device, false); err == nil {
		t.Fatal("what is damaged can be read")
	}
	must(t, n2.PowerOn())
	must(t, n2.Serve(t.Context()))
	awaitRepaired(t, c, "v", n1, dir, right)
	awaitVolume(t, c, "v", "healthy again", both)
	if now := replicasOf(t, c, "v"); now[n1.Name].Name != was[n1.Name].Name || now[n2.Name].Name != was[n2.Name].Name {
		t.Errorf("others took the place of the replicas: %v, then %v", was, now)
	}
	must(t, l.load.Verify(l.device, false))
	c.detach(t, "v")
	l.attach(n2)
	l.halt()
}

// layersOf lists the folders of the layers of a volume's snapshots on a machine, once the layers have digests.
func layersOf(t *testing.T, c *Cluster, volume string, m *Machine) (dirs []string) {
	t.Helper()
	var stack struct {
		Body struct{ Snapshots []struct{ Layer string } }
	}
	b, err := os.ReadFile(m.Disks[0].View("replicas", string(replicasOf(t, c, volume)[m.Name].Spec.UID), "stack.json"))
	must(t, errors.Join(err, json.Unmarshal(b, &stack)))
	for _, s := range stack.Body.Snapshots {
		dir := m.Disks[0].View("layers", s.Layer)
		eventually(t, "a layer of "+m.Name+" has digests", func() bool {
			_, err := os.Stat(filepath.Join(dir, "layer.json"))
			return err == nil
		})
		dirs = append(dirs, dir)
	}
	return dirs
}

// spoilLayer changes bytes in a layer's blocks with data, and with holes also in a hole.
func spoilLayer(t *testing.T, dir string, holes bool) (right []byte) {
	t.Helper()
	name := filepath.Join(dir, "data")
	right, err := os.ReadFile(name)
	must(t, err)
	for at, n := int64(1<<20), 0; n < 16; at += 4096 {
		if right[at] != 0 {
			must(t, corrupt(name, at+40, 4000))
			n++
		}
	}
	if holes { // damage may also fill a hole
		must(t, corrupt(name, 10<<20, 16<<10))
	}
	return right
}

// dropped lists the reasons why replicas of a volume were dropped.
func dropped(t *testing.T, c *Cluster, volume string) (why []string) {
	t.Helper()
	var list eventsv1.EventList
	must(t, c.Objects.List(t.Context(), &list))
	for _, e := range list.Items {
		if e.Regarding.Name == volume && e.Reason == "ReplicaDropped" {
			why = append(why, e.Note)
		}
	}
	return why
}

// awaitRepaired waits until a layer has the right bytes again, and the API reports no damage.
func awaitRepaired(t *testing.T, c *Cluster, volume string, m *Machine, dir string, right []byte) {
	t.Helper()
	eventually(t, "the layer on "+m.Name+" is what it was", func() bool {
		now, err := os.ReadFile(filepath.Join(dir, "data"))
		return err == nil && bytes.Equal(now, right)
	})
	eventually(t, "the API says so", func() bool { return len(replicasOf(t, c, volume)[m.Name].Status.Damage) == 0 })
}
