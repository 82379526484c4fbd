package stack

import (
	"fmt"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// Unfinished lists the frozen layers that a replica or an image of this disk names.
func (d *Disk) Unfinished() ([]string, error) {
	frozen, _, err := d.unfinished()
	return frozen, err
}

// ToFinish lists what Finish is for: the layers of Unfinished, and finished ones that are named and lack the checksums
// of their blocks.
func (d *Disk) ToFinish() ([]string, error) {
	frozen, lacking, err := d.unfinished()
	return append(frozen, lacking...), err
}

func (d *Disk) unfinished() (frozen, lacking []string, err error) {
	names, unread := d.namedSurely()
	if len(names) == 0 && unread != nil { // else what cannot be read is told elsewhere
		return nil, nil, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(unread))
	}
	d.names.wholeMu.Lock()
	defer d.names.wholeMu.Unlock()
	whole := make(map[string]int64, len(d.names.whole))
	for uid := range names {
		if n, was := d.names.whole[uid]; was && d.HasCRCs(uid, n) {
			if _, _, err := d.FileID(d.Join(layer.Dir, uid, layer.LayerFile)); err == nil {
				whole[uid] = n // the record itself need not be read again
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
	d.names.whole = whole
	return frozen, lacking, nil
}
