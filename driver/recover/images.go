package recover

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/driver/cli"
)

type image struct {
	block.Image
	on []*disk
}

func (i *image) newFinding(state, note string) cli.Finding {
	return cli.Finding{Kind: "BackingImage", Name: i.Name, UID: api.UID(i.UID), Disk: i.on[0].Path(), State: state,
		Note: note}
}

func (j *job) planImages() {
	all := map[string]*image{}
	names := map[string][]*image{}
	for _, d := range j.disks {
		for _, rec := range d.images {
			if img := all[rec.UID]; img != nil {
				img.on = append(img.on, d)
				continue
			}
			img := &image{rec, []*disk{d}}
			all[rec.UID] = img
			names[rec.Name] = append(names[rec.Name], img)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		for _, img := range names[name] {
			j.planImage(img, len(names[name]) > 1)
		}
	}
}

func (j *job) planImage(img *image, ambiguous bool) {
	have := j.images[img.Name]
	switch {
	case have == nil && ambiguous:
		j.addStep(step{Finding: img.newFinding(cli.FoundConflict, "the disks hold several images of this name: choose the "+
			"disk of the right image with --disk")})
	case have == nil:
		obj, note, err := img.recordedObject()
		if err != nil {
			j.addStep(step{Finding: img.newFinding(cli.FoundDamaged, err.Error())})
			return
		}
		s := j.addStep(step{Finding: img.newFinding(cli.FoundMissing, note), do: j.createObject(obj), done: "created",
			wait: j.awaitImage(img.Name)})
		s.Action = "create"
	case have.Status.UUID != api.UID(img.UID):
		if r, err := have.Recovered(); err == nil && r != nil && r.UUID == api.UID(img.UID) {
			j.addStep(step{Finding: img.newFinding(cli.FoundThere, "waits for the controller")})
			return
		}
		j.addStep(step{Finding: img.newFinding(cli.FoundConflict, fmt.Sprintf("the API has another image of this name, %s",
			orNone(have.Status.UUID)))})
	default:
		j.addStep(step{Finding: img.newFinding(cli.FoundThere, "")})
		for _, d := range img.on {
			j.planCopy(have, img, d)
		}
	}
}

func orNone(uid api.UID) string {
	if uid == "" {
		return "which has no uid yet"
	}
	return string(uid)
}

// planCopy compares a copy on a disk with the API's ImageCopy.
func (j *job) planCopy(have *api.BackingImage, img *image, d *disk) {
	name := img.UID + "." + d.UID()[:8]
	f := cli.Finding{Kind: "ImageCopy", Name: name, UID: api.UID(img.UID), Disk: d.Path(), State: cli.FoundThere}
	c := j.copies[name]
	export := have.Status.Export
	if export == nil && have.Spec.SourceType == api.SourceExport {
		export = &api.ExportFact{} // as for a recovered image: the layers may still lack digests
	}
	switch {
	case c == nil && have.DeletionTimestamp == nil:
		f.State, f.Action = cli.FoundMissing, "create"
		j.addStep(step{Finding: f, done: "created", do: j.createObject(&api.ImageCopy{
			ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer}, Labels: map[string]string{
				api.LabelImage: api.LabelValue(img.Name), api.LabelDisk: d.UID(), api.LabelNode: api.LabelValue(d.node)}},
			Spec: api.ImageCopySpec{Image: img.Name, UUID: have.Status.UUID, Layers: have.Status.Layers, Node: d.node,
				Disk: d.uid(), Export: export}})})
	case c == nil:
		f.Note = "the image is being deleted"
		j.addStep(step{Finding: f})
	case c.Spec.UUID != api.UID(img.UID) || c.Spec.Disk != d.uid():
		f.State, f.Note = cli.FoundConflict, "the API has another copy of this name, on disk "+string(c.Spec.Disk)
		j.addStep(step{Finding: f})
	case c.Spec.Node != d.node:
		f.State, f.Action, f.Note = cli.FoundMoved, "move", fmt.Sprintf("from node %s to %s", c.Spec.Node, d.node)
		j.addStep(step{Finding: f, done: "moved", do: j.recordNode(c, func() {
			c.Spec.Node = d.node
			setNodeLabel(c, d.node)
		})})
	default:
		j.addStep(step{Finding: f})
	}
}

func setNodeLabel(obj metav1.Object, node string) {
	labels := maps.Clone(obj.GetLabels())
	if labels == nil {
		labels = map[string]string{}
	}
	labels[api.LabelNode] = api.LabelValue(node)
	obj.SetLabels(labels)
}

// recordedObject returns the BackingImage from the record on the disk.
func (i *image) recordedObject() (obj *api.BackingImage, note string, err error) {
	rec := api.ImageRecord{Spec: api.BackingImageSpec{SourceType: api.SourceUpload, SourceParameters: map[string]string{},
		Checksum: i.Checksum, MinNumberOfCopies: 1}}
	note = "its source is not recorded: it becomes an upload"
	if i.Object != nil {
		rec, note = api.ImageRecord{}, ""
		if err := json.Unmarshal(i.Object, &rec); err != nil {
			return nil, "", api.Errorf(api.Corrupt, "the image's record: %w", err)
		}
	}
	known := api.RecoveredImage{UUID: api.UID(i.UID), Format: i.Format, VirtualSize: i.VirtualSize, Checksum: i.Checksum,
		Digest: i.Digest}
	for _, l := range i.Layers {
		known.Layers = append(known.Layers, api.UID(l))
	}
	for _, d := range i.on {
		known.Copies = append(known.Copies, api.RecoveredCopy{Node: d.node, Disk: d.uid()})
	}
	meta, err := metaOf(i.Name, rec.Labels, rec.Annotations, known)
	rec.Spec.CleanupDisks = nil // the recorded request is out of date
	return &api.BackingImage{ObjectMeta: meta, Spec: rec.Spec}, note, err
}

func metaOf(name string, labels, annotations map[string]string, known any) (metav1.ObjectMeta, error) {
	text, err := json.Marshal(known)
	annotations = maps.Clone(annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[api.AnnotationRecovered] = string(text)
	return metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations,
		Finalizers: []string{api.Finalizer}}, err
}
