package stack

import (
	"fmt"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Unfinished lists the frozen layers with a reference.
func (d *Disk) Unfinished() ([]string, error) {
	frozen, _, err := d.unfinishedLayers()
	return frozen, err
}

// ToFinish lists the layers for Finish: frozen layers with a reference, and finished ones without checksums.
func (d *Disk) ToFinish() ([]string, error) {
	frozen, lacking, err := d.unfinishedLayers()
	return append(frozen, lacking...), err
}

func (d *Disk) unfinishedLayers() (frozen, lacking []string, err error) {
	names, unread := d.namedReadable()
	if len(names) == 0 && unread != nil { // otherwise other callers report unreadable records
		return nil, nil, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(unread))
	}
	d.references.wholeMu.Lock()
	defer d.references.wholeMu.Unlock()
	whole := make(map[string]int64, len(d.references.whole))
	for uid := range names {
		if n, was := d.references.whole[uid]; was && d.HasCRCs(uid, n) {
			if _, _, err := d.FileID(d.Join(layer.Dir, uid, layer.LayerFile)); err == nil {
				whole[uid] = n // without a read of the record
				continue
			}
		}
		rec, err := d.Record(uid)
		switch {
		case err == nil && d.HasCRCs(uid, format.CRCsLength(rec.Size)):
			whole[uid] = format.CRCsLength(rec.Size)
		case err == nil:
			lacking = append(lacking, uid)
		case api.Is(err, api.NotFound):
			if there, err := d.Exists(d.Join(layer.Dir, uid, layer.FrozenFile)); err == nil && there {
				frozen = append(frozen, uid)
			}
		}
	}
	d.references.whole = whole
	return frozen, lacking, nil
}
