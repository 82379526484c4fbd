package restoring

import (
	"context"
	"testing"
	"testing/synctest"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// hangingDisk is a disk that hangs in reads, or in the list of its layers.
type hangingDisk struct {
	block.DigestLayers
	inList bool
	hangs  chan struct{}
}

func (d hangingDisk) LayerNames() ([]string, error) {
	if d.inList {
		<-d.hangs
	}
	return d.DigestLayers.LayerNames()
}

func (d hangingDisk) Open(uid string) (block.Source, error) {
	src, err := d.DigestLayers.Open(uid)
	return hangingSource{src, d.hangs}, err
}

type hangingSource struct {
	block.Source
	hangs chan struct{}
}

func (s hangingSource) ReadAt(p []byte, off int64) (int, error) {
	<-s.hangs
	return s.Source.ReadAt(p, off)
}

// TestStoreSendsChunksOfADiskThatHangs: another disk of the node has all chunks of a backup, and hangs. The restore
// fetches the chunks from the store. A second restore does not wait for the disk, and the disk gets its open layer back
// when it answers.
func TestStoreSendsChunksOfADiskThatHangs(t *testing.T) {
	for name, inList := range map[string]bool{"list": true, "read": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near := newWorld(t, newStore(3*chunk))
				near.plan()
				_, err := near.restore(near.l.Fill(false))
				must(t, err)
				far := hangingDisk{near.disk, inList, make(chan struct{})}
				on := newDisk(t)
				for n := range 2 {
					spec := importer.Spec{UID: api.NewUID(), Name: "again", Layers: []api.UID{api.NewUID()}}
					w := worldOn(t, newStore(3*chunk), on, spec)
					w.set.Options.Disks = func(context.Context) []block.Layers { return []block.Layers{far} }
					w.plan()
					_, err := w.restore(w.l.Fill(false))
					must(t, err)
					if n == 0 && len(w.written) != 3 { // later the layer's own disk has them
						t.Errorf("the store sent the chunks %v", w.written)
					}
					for c := range int64(3) {
						w.compare(w.source(), c)
					}
				}
				close(far.hangs)
				synctest.Wait()
			})
		})
	}
}
