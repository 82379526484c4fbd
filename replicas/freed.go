package replicas

import (
	"time"

	"drover.io/drover/replicas/stack"
)

// Layers that a clone, an image or a copy under way names are not merged. When one of these goes, what it held back is:
// the replicas in which layers can be merged now are looked for.

// freedEvery is how often they are looked for without anything known to have gone.
const freedEvery = 5 * time.Minute

// freed has a disk looked at where something names fewer layers than before.
func (d *Data) freed(disk *stack.Disk) {
	d.mu.Lock()
	d.fewer[disk] = true
	d.mu.Unlock()
	d.tidy(disk)
}

// findMergeable finds what can be merged on such a disk.
func (d *Data) findMergeable(disk *stack.Disk) {
	d.mu.Lock()
	look := d.fewer[disk]
	delete(d.fewer, disk)
	d.mu.Unlock()
	if !look {
		return
	}
	found, err := disk.Mergeable()
	if err != nil {
		d.Log.Warn("what can be merged is not known", "disk", disk.Path(), "err", err)
	}
	for uid, volume := range found {
		d.mergeSoon(disk, uid, volume)
	}
}
