package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

func (w *model) unimage(d deed) error {
	if len(w.images) == 0 {
		return nil
	}
	i := w.images[d.A%uint64(len(w.images))]
	i.removing = true
	err := w.d.RemoveImage(i.rec.UID)
	switch {
	case err == nil:
		w.images = slices.DeleteFunc(w.images, func(o *mimage) bool { return o == i })
	case api.Is(err, api.InUse):
		i.removing = false
		return nil
	}
	return err
}

// read opens a snapshot for reading, for some time.
func (w *model) read(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil || len(w.readers) >= 3 {
		return nil
	}
	layers, err := w.chain(v, s)
	if err != nil {
		return err
	}
	src, err := w.d.OpenStack(layers, s.size)
	if api.Is(err, api.Busy) {
		return nil
	}
	if err == nil {
		w.readers = append(w.readers, mreader{src, s.img})
	}
	return err
}

// delta compares the changes between two snapshots of a volume, according to the maps, with the snapshots' content.
func (w *model) delta(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil {
		return nil
	}
	base := &msnap{}
	if d.C%3 > 0 {
		_, base = w.snap(d.A, d.C)
	}
	x, err := w.d.Changes(v.uid, block.SnapshotCut{UID: base.uid}, block.SnapshotCut{UID: s.uid})
	if api.Is(err, api.Busy) {
		return nil
	}
	if err != nil {
		return err
	}
	told := map[int64]bool{}
	for off := int64(0); off < x.Size(); {
		e, err := x.Next(off)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return errors.Join(err, x.Close())
		}
		for i := e.Off / 512; i < e.End()/512; i++ {
			told[i] = true
		}
		off = e.End()
	}
	if err := x.Close(); err != nil {
		return err
	}
	all := maps.Clone(s.img)
	maps.Copy(all, base.img)
	for sector := range all {
		if s.img[sector] != base.img[sector] && sector*512 < s.size && !told[sector] {
			return fmt.Errorf("sector %d: %d is %d now, and the maps do not tell", sector, base.img[sector], s.img[sector])
		}
	}
	return nil
}

func (w *model) unread(d deed) error {
	if len(w.readers) == 0 {
		return nil
	}
	k := int(d.A % uint64(len(w.readers)))
	r := w.readers[k]
	w.readers = slices.Delete(w.readers, k, k+1)
	return errors.Join(same(r.src, r.img), sameDigests(r.src), r.src.Close())
}

// scrub verifies all finished layers.
func (w *model) scrub(deed) error {
	for _, v := range w.vols {
		list, err := w.layers(v, true)
		if err != nil {
			return err
		}
		for _, uid := range list {
			if err := w.d.Verify(context.Background(), uid); err != nil && !api.Is(err, api.Busy) {
				return err
			}
		}
	}
	return nil
}

func (w *model) collect(deed) error { return w.d.Collect(context.Background(), 0) }
