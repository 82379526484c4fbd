package recover

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block"
	"drover.io/drover/driver/cli"
	"drover.io/drover/replicas/stack"
)

// replica is a stack on a disk.
type replica struct {
	stack.Meta
	on *disk
}

// volume is the disks' knowledge of a volume: its replicas, first the replica that adopted the latest session.
type volume struct {
	uid  api.UID
	name string
	reps []*replica
}

func (v *volume) newFinding(state, note string) cli.Finding {
	return cli.Finding{Kind: "Volume", Name: v.name, UID: v.uid, Disk: v.reps[0].on.Path(), State: state, Note: note}
}

func (r *replica) newFinding(state, note string) cli.Finding {
	return cli.Finding{Kind: "Replica", Name: replicaName(r.Volume, r.UID), UID: api.UID(r.UID), Disk: r.on.Path(),
		State: state, Note: note}
}

// memberUIDs returns the UIDs of the members of the latest session.
func (v *volume) memberUIDs() []string {
	if m := v.reps[0].Members; len(m) > 0 {
		return m
	}
	return []string{v.reps[0].UID} // never attached
}

func (v *volume) memberNames() []string {
	var names []string
	for _, uid := range v.memberUIDs() {
		names = append(names, replicaName(v.name, uid))
	}
	return names
}

// epoch returns the epoch of the latest session, or 1 for a volume that was never attached.
func (v *volume) epoch() int64 { return max(v.reps[0].Epoch, 1) }

// revertedEpoch returns the epoch of the last revert of a replica that has not joined since; 0: none.
func (v *volume) revertedEpoch() int64 {
	last := int64(0)
	for _, r := range v.reps {
		if r.Joined <= r.Reverted { // else the replica has the content of the members that it joined
			last = max(last, r.Reverted)
		}
	}
	return last
}

func (j *job) planVolumes() {
	byUID := map[string][]*replica{}
	for _, d := range j.disks {
		for _, m := range d.reps {
			byUID[m.UID] = append(byUID[m.UID], &replica{m, d})
		}
	}
	all := map[string]*volume{}
	torn := map[string]bool{} // volumes with a replica on two disks
	for _, uid := range slices.Sorted(maps.Keys(byUID)) {
		reps := byUID[uid]
		for _, r := range reps {
			if len(reps) > 1 {
				torn[r.VolumeUID] = true
				j.addStep(step{Finding: r.newFinding(cli.FoundConflict, fmt.Sprintf("%d disks claim this replica: one is a copy, "+
					"take it away", len(reps)))})
				continue
			}
			v := all[r.VolumeUID]
			if v == nil {
				v = &volume{uid: api.UID(r.VolumeUID), name: r.Volume}
				all[r.VolumeUID] = v
			}
			v.reps = append(v.reps, r)
		}
	}
	names := map[string][]*volume{}
	for _, v := range all {
		slices.SortFunc(v.reps, func(a, b *replica) int {
			switch {
			case a.Epoch != b.Epoch:
				return int(b.Epoch - a.Epoch)
			case a.Incarnation != b.Incarnation:
				return int(b.Incarnation - a.Incarnation)
			}
			return strings.Compare(a.UID, b.UID)
		})
		names[v.name] = append(names[v.name], v)
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		vols := names[name]
		slices.SortFunc(vols, func(a, b *volume) int { return strings.Compare(string(a.uid), string(b.uid)) })
		for _, v := range vols {
			if torn[string(v.uid)] {
				j.addStep(step{Finding: v.newFinding(cli.FoundConflict, "one of its replicas is claimed by several disks")})
				continue
			}
			j.planVolume(v, len(vols) > 1)
		}
	}
}

func (j *job) planVolume(v *volume, ambiguous bool) {
	have := j.volumes[v.name]
	lead := v.reps[0]
	if len(v.reps) > 1 && lead.Epoch == v.reps[1].Epoch && !slices.Equal(lead.Members, v.reps[1].Members) {
		j.addStep(step{Finding: v.newFinding(cli.FoundConflict, fmt.Sprintf("the replicas name different members in epoch %d",
			lead.Epoch))})
		return
	}
	if have == nil && ambiguous {
		j.addStep(step{Finding: v.newFinding(cli.FoundConflict, "the disks hold several volumes of this name: choose the "+
			"disk of the right volume with --disk")})
		return
	}
	if have != nil && have.Status.UID != v.uid {
		if r, err := have.Recovered(); err != nil || r == nil || r.UID != v.uid {
			j.addStep(step{Finding: v.newFinding(cli.FoundConflict, fmt.Sprintf("the API has another volume of this name, %s",
				orNone(have.Status.UID)))})
			return
		}
	}
	obj, err := j.volumeObject(v)
	if err != nil {
		j.addStep(step{Finding: v.newFinding(cli.FoundDamaged, err.Error())})
		return
	}
	before := len(j.steps)
	for _, r := range v.reps {
		if j.planReplica(v, r, have) {
			continue
		}
		for _, s := range j.steps[before:] { // all steps of a volume, or none
			s.do, s.Action = nil, ""
		}
		j.addStep(step{Finding: v.newFinding(cli.FoundConflict, "the replica is in conflict")})
		return
	}
	switch {
	case have == nil:
		s := j.addStep(step{Finding: v.newFinding(cli.FoundMissing, fmt.Sprintf("%s, epoch %d, members %s",
			api.SizeText(obj.Spec.Size), v.epoch(), strings.Join(v.memberNames(), " "))),
			do: j.createObject(obj), done: "created"})
		s.Action = "create"
		if slices.Contains(v.memberUIDs(), lead.UID) {
			s.wait = j.awaitVolume(v.name)
		}
	case have.DeletionTimestamp != nil:
		j.addStep(step{Finding: v.newFinding(cli.FoundThere, "being deleted")})
	case have.Status.UID == v.uid && have.Status.Epoch < lead.Epoch:
		s := j.addStep(step{Finding: v.newFinding(cli.FoundBehind, fmt.Sprintf("the API says epoch %d, the disk %d",
			have.Status.Epoch, lead.Epoch))})
		if j.options.RaiseEpochs {
			s.Action, s.done, s.do = "raise epoch", "raised", j.raiseEpoch(have, v)
		}
	default:
		j.addStep(step{Finding: v.newFinding(cli.FoundThere, "")})
	}
}

// raiseEpoch sets the volume's epoch to the disk's epoch, by compare-and-swap on the epoch: other fields of the status
// may have changed since the read.
func (j *job) raiseEpoch(have *api.Volume, v *volume) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := await.EditStatus(ctx, j.client, v.name, func(now *api.Volume) (bool, error) {
			if now.UID != have.UID || now.Status.UID != v.uid || now.Status.Epoch != have.Status.Epoch {
				return false, api.Errorf(api.Exists, "the object is volume %s in epoch %d now, and was %s in epoch "+
					"%d; run the command again",
					now.Status.UID, now.Status.Epoch, v.uid, have.Status.Epoch)
			}
			now.Status.Epoch, now.Status.Members = v.epoch(), v.memberNames()
			now.Status.RevertedEpoch = max(now.Status.RevertedEpoch, v.revertedEpoch())
			return true, nil
		})
		return err
	}
}

// planReplica reports false if the API's replica contradicts the disk.
func (j *job) planReplica(v *volume, r *replica, have *api.Volume) bool {
	name := replicaName(v.name, r.UID)
	obj := j.reps[name]
	current := slices.Contains(v.memberUIDs(), r.UID)
	if obj != nil && (obj.Spec.UID != api.UID(r.UID) || obj.Spec.VolumeUID != v.uid || obj.Spec.Disk != r.on.uid()) {
		j.addStep(step{Finding: r.newFinding(cli.FoundConflict, fmt.Sprintf("the API has another replica of this name, "+
			"%s on disk %s", obj.Spec.UID, obj.Spec.Disk))})
		return false
	}
	switch {
	case obj == nil && !current:
		j.addStep(step{Finding: r.newFinding(cli.FoundStale, fmt.Sprintf("last current in epoch %d, the volume is in %d: it "+
			"stays on its disk", r.Epoch, v.epoch()))})
	case obj == nil && have != nil && have.DeletionTimestamp != nil:
		j.addStep(step{Finding: r.newFinding(cli.FoundStale, "the volume is being deleted: it stays on its disk")})
	case obj == nil:
		s := j.addStep(step{Finding: r.newFinding(cli.FoundMissing, ""), do: j.createObject(j.replicaObject(v, r)),
			done: "created"})
		s.Action = "create"
	case obj.Spec.Node != r.on.node:
		if a := j.atts[v.name]; a != nil && a.Spec.Node != r.on.node {
			j.addStep(step{Finding: r.newFinding(cli.FoundConflict, fmt.Sprintf("the disk is on node %s now, and the volume is "+
				"attached to node %s: detach it", r.on.node, a.Spec.Node))})
			return false
		}
		s := j.addStep(step{Finding: r.newFinding(cli.FoundMoved, fmt.Sprintf("from node %s to %s", obj.Spec.Node,
			r.on.node)), done: "moved", do: j.recordNode(obj, func() {
			obj.Spec.Node = r.on.node
			setNodeLabel(obj, r.on.node)
		})})
		s.Action = "move"
	default:
		j.addStep(step{Finding: r.newFinding(cli.FoundThere, "")})
	}
	return true
}

func (j *job) replicaObject(v *volume, r *replica) *api.Replica {
	obj := &api.Replica{
		ObjectMeta: metav1.ObjectMeta{Name: replicaName(v.name, r.UID), Finalizers: []string{api.Finalizer},
			Labels: map[string]string{api.LabelVolume: api.LabelValue(v.name), api.LabelNode: api.LabelValue(r.on.node),
				api.LabelDisk: r.on.UID()}},
		Spec: api.ReplicaSpec{UID: api.UID(r.UID), Volume: v.name, VolumeUID: v.uid, Node: r.on.node, Disk: r.on.uid(),
			Size: r.Size},
	}
	if img := r.imageBelow(); img != nil {
		obj.Labels[api.LabelImage] = api.LabelValue(img.name)
		for _, l := range img.layers {
			obj.Spec.Layers = append(obj.Spec.Layers, api.UID(l))
		}
		return obj
	}
	for _, l := range r.Layers {
		obj.Spec.Layers = append(obj.Spec.Layers, api.UID(l))
	}
	return obj
}

type below struct {
	name   string
	layers []string
}

// imageBelow returns the backing image on the replica's disk under the replica's layers, or nil.
func (r *replica) imageBelow() *below {
	for _, i := range r.on.images {
		if n := len(i.Layers); n > 0 && len(r.Layers) >= n && slices.Equal(r.Layers[:n], i.Layers) {
			return &below{i.Name, i.Layers}
		}
	}
	return nil
}

// volumeObject returns the Volume as the disk recorded the object last, with the size of the replica.
func (j *job) volumeObject(v *volume) (*api.Volume, error) {
	lead := v.reps[0]
	var rec api.VolumeRecord
	if lead.Object != nil {
		if err := json.Unmarshal(lead.Object, &rec); err != nil {
			return nil, api.Errorf(api.Corrupt, "the volume's record: %w", err)
		}
	} else {
		rec.Spec.NumberOfReplicas = int32(len(v.memberUIDs()))
		if img := lead.imageBelow(); img != nil {
			rec.Spec.BackingImage = img.name
		}
	}
	rec.Spec.Size = max(rec.Spec.Size, lead.Size)
	meta, err := metaOf(v.name, rec.Labels, rec.Annotations, api.RecoveredVolume{UID: v.uid, Epoch: v.epoch(),
		Size: lead.Size, Members: v.memberNames(), RevertedEpoch: v.revertedEpoch()})
	return &api.Volume{ObjectMeta: meta, Spec: rec.Spec}, err
}

// planLost reports replicas and image copies that the API expects on a disk, but the disk lacks.
func (j *job) planLost() {
	on := map[api.UID]*disk{}
	for _, d := range j.disks {
		on[d.uid()] = d
	}
	for _, name := range slices.Sorted(maps.Keys(j.reps)) {
		r := j.reps[name]
		d := on[r.Spec.Disk]
		if d == nil || r.Status.Mode == "" || r.Status.Mode == api.ReplicaCreating ||
			slices.ContainsFunc(d.reps, func(m stack.Meta) bool { return m.UID == string(r.Spec.UID) }) {
			continue
		}
		j.addStep(step{Finding: cli.Finding{Kind: "Replica", Name: name, UID: r.Spec.UID, Disk: d.Path(),
			State: cli.FoundLost, Note: "the API has it, its disk does not"}})
	}
	for _, name := range slices.Sorted(maps.Keys(j.copies)) {
		c := j.copies[name]
		d := on[c.Spec.Disk]
		if d == nil || c.Status.State != api.ImageReady {
			continue
		}
		if !slices.ContainsFunc(d.images, func(i block.Image) bool { return i.UID == string(c.Spec.UUID) }) {
			j.addStep(step{Finding: cli.Finding{Kind: "ImageCopy", Name: name, UID: c.Spec.UUID, Disk: d.Path(),
				State: cli.FoundLost, Note: "the API has it, its disk does not"}})
		}
	}
}
