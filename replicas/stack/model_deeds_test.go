package stack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/layer"
)

// deeds has the kinds of deeds in programs, and how often a program has each.
var deeds map[string]struct {
	often int
	do    func(w *model, d deed) error
}

func init() { // not a literal: the deeds read the map
	deeds = map[string]struct {
		often int
		do    func(w *model, d deed) error
	}{
		"create":   {3, (*model).create},
		"write":    {24, (*model).write},
		"batch":    {6, (*model).batch},
		"discard":  {6, (*model).discard},
		"flush":    {6, (*model).flush},
		"snapshot": {9, (*model).snapshot},
		"group":    {3, (*model).group},
		"abort":    {1, (*model).abort},
		"drop":     {5, (*model).drop},
		"clone":    {5, (*model).clone},
		"revert":   {3, (*model).revert},
		"expand":   {2, (*model).expand},
		"remove":   {2, (*model).remove},
		"close":    {4, (*model).closeOne},
		"restart":  {2, (*model).restart},
		"finish":   {8, (*model).finish},
		"merge":    {8, (*model).merge},
		"image":    {2, (*model).image},
		"unimage":  {1, (*model).unimage},
		"read":     {3, (*model).read},
		"pages":    {3, (*model).pages},
		"unread":   {2, (*model).unread},
		"hold":     {2, (*model).hold},
		"digest":   {1, (*model).digest},
		"release":  {1, (*model).release},
		"scrub":    {2, (*model).scrub},
		"delta":    {3, (*model).delta},
		"collect":  {3, (*model).collect},
		"check":    {2, func(w *model, d deed) error { return w.check() }},
		"kill":     {7, (*model).kill},
		"power":    {7, (*model).lose},
	}
}

// step does a deed, and recovers if the process or the power ended during the deed.
func (w *model) step(d deed) error {
	err := deeds[d.Do].do(w, d)
	if cerr := w.d.Close(); err == nil { // removals in the background belong to the deed
		err = cerr
	}
	if w.p.fs.Killed() {
		return w.crash()
	}
	return err
}

func (w *model) kill(d deed) error { return w.die(d, false) }
func (w *model) lose(d deed) error { return w.die(d, true) }

// die lets some changes happen before the end.
func (w *model) die(d deed, power bool) error {
	w.power, w.chance = power, d.B
	n := int(d.A % 40)
	if d.C%4 == 0 {
		n = int(d.A % 150)
	}
	w.p.fs.KillAfter(n)
	return nil
}

func (w *model) vol(a uint64) *mvol {
	if len(w.vols) == 0 {
		return nil
	}
	return w.vols[a%uint64(len(w.vols))]
}

// open opens a volume, unless the volume is open.
func (w *model) open(v *mvol) error {
	if v.r != nil {
		return nil
	}
	r, err := w.d.openReplica(context.Background(), v.uid, w.p)
	if err != nil {
		return err
	}
	v.epoch++
	if err := r.Adopt(context.Background(), v.epoch, 1, []string{v.uid}); err != nil {
		return errors.Join(err, r.Close())
	}
	v.r = r
	return nil
}

func (w *model) close(v *mvol) error {
	if v.r == nil {
		return nil
	}
	r := v.r
	v.r = nil
	err := r.Close()
	if err == nil {
		v.durable()
	}
	return err
}

// pages drops the pages of an index without I/O since the deed before.
func (w *model) pages(d deed) error {
	v := w.vol(d.A)
	if v == nil || v.r == nil {
		return nil
	}
	_, err := v.r.DropPages(context.Background())
	return err
}

const maxVols = 4

func (w *model) create(d deed) error {
	if len(w.vols) >= maxVols {
		return nil
	}
	size := smallSize
	if d.A%3 == 0 {
		size = largeSize
	}
	return w.make(newVol(string(api.NewUID()), size, nil), nil)
}

func (w *model) make(v *mvol, layers []string) error {
	if v.now == nil {
		v.now = image{}
	}
	v.creating = true
	w.vols = append(w.vols, v)
	v.spec = Spec{UID: v.uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: v.size, Layers: layers}
	err := w.d.CreateReplica(context.Background(), v.spec)
	if err == nil {
		v.creating = false
	}
	if api.Is(err, api.Busy) {
		w.vols = w.vols[:len(w.vols)-1]
		err = nil
	}
	return err
}

// io does a request, and updates the model for an acknowledged or a failed request.
func (w *model) io(v *mvol, op block.Op, s block.Span, value uint64, fua bool) error {
	var buf []byte
	if op == block.OpWrite {
		buf = block.AlignedBuffer(int(s.Len))
		fillBlocks(buf, value, s.Off)
	}
	if err := issue(w.p, v.r, op, s.Off, s.Len, buf, fua); err != nil {
		v.flies(s, value)
		return err
	}
	v.becomes(s, value)
	if fua {
		v.durable()
	}
	return nil
}

func (w *model) value(c uint64) uint64 {
	if c%5 == 0 {
		return 0
	}
	w.next++
	return w.next
}

func (w *model) write(d deed) error {
	v := w.vol(d.C)
	if v == nil {
		return nil
	}
	if err := w.open(v); err != nil {
		return err
	}
	return w.io(v, block.OpWrite, place(v.size, d.A, d.B), w.value(d.C>>8), d.C>>16%8 == 0)
}

// batch has several requests in progress at once, for disjoint ranges.
func (w *model) batch(d deed) error {
	v := w.vol(d.C)
	if v == nil {
		return nil
	}
	if err := w.open(v); err != nil {
		return err
	}
	type flying struct {
		s     block.Span
		value uint64
		q     *block.Request
	}
	var all []flying
	done := make(chan struct{}, 8)
	for k := range int64(8) {
		s := block.Span{Off: (k*8 + int64(d.A>>(4*k)%4)) << blockBits, Len: (1 + int64(d.B>>(4*k)%4)) << blockBits}
		value := w.value(d.C >> (8 + k))
		q := &block.Request{Op: block.OpWrite, Off: s.Off, Len: s.Len, Done: func(*block.Request) { done <- struct{}{} }}
		if d.A>>(40+k)%4 == 0 {
			q.Op, value = block.OpDiscard, 0
		} else {
			q.Buf = block.AlignedBuffer(int(s.Len))
			fillBlocks(q.Buf, value, s.Off)
		}
		all = append(all, flying{s, value, q})
	}
	w.p.Post(func() {
		for _, f := range all {
			v.r.Submit(f.q)
		}
	})
	for range all {
		<-done
	}
	var errs []error
	for _, f := range all {
		if f.q.Err != nil {
			v.flies(f.s, f.value)
		} else {
			v.becomes(f.s, f.value)
		}
		errs = append(errs, f.q.Err)
	}
	return errors.Join(errs...)
}

func (w *model) discard(d deed) error {
	v := w.vol(d.C)
	if v == nil {
		return nil
	}
	if err := w.open(v); err != nil {
		return err
	}
	op := []block.Op{block.OpDiscard, block.OpZero}[d.C>>8%2]
	return w.io(v, op, place(v.size, d.A, d.B), 0, d.C>>16%8 == 0)
}

func (w *model) flush(d deed) error {
	v := w.vol(d.A)
	if v == nil {
		return nil
	}
	if err := w.open(v); err != nil {
		return err
	}
	err := issue(w.p, v.r, block.OpFlush, 0, 0, nil, false)
	if err == nil {
		v.durable()
	}
	return err
}

// snapshot cuts a volume, with I/O between the preparation and the cut.
func (w *model) snapshot(d deed) error { return w.cut(d, 1, false) }
func (w *model) group(d deed) error    { return w.cut(d, 3, false) }
func (w *model) abort(d deed) error    { return w.cut(d, 1, true) }

const maxSnaps = 12

func (w *model) cut(d deed, n int, abort bool) (err error) {
	type part struct {
		v *mvol
		c *Cut
		s *msnap
	}
	var parts []part
	defer func() {
		for _, p := range parts {
			_ = p.c.Abort() // after an error
		}
	}()
	for k := range n {
		v := w.vol(d.A + uint64(k))
		if v == nil || len(v.snaps) >= maxSnaps || slices.ContainsFunc(parts, func(p part) bool { return p.v == v }) {
			continue
		}
		if err := w.open(v); err != nil {
			return err
		}
		s := Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID())}
		if s.Name = s.UID; d.B>>k%5 == 0 {
			s.Name = "" // a layer without a snapshot
		}
		c, err := v.r.PrepareCut(context.Background(), s)
		if err != nil {
			return err
		}
		p := part{v, c, nil}
		if s.Name != "" {
			p.s = &msnap{uid: s.UID, size: v.size, pending: true}
		}
		parts = append(parts, p)
	}
	for _, p := range parts {
		for k := range d.C % 3 {
			if err := w.io(p.v, block.OpWrite, place(p.v.size, d.B>>(k*7), d.C>>(k*5)), w.value(d.C>>k), false); err != nil {
				return err
			}
		}
	}
	if abort {
		for _, p := range parts {
			if err := p.c.Abort(); err != nil {
				return err
			}
		}
		return nil
	}
	if len(parts) == 0 {
		return nil
	}
	var cuts []*Cut
	for _, p := range parts {
		if cuts = append(cuts, p.c); p.s != nil {
			p.v.snaps = append(p.v.snaps, p.s)
		}
	}
	if err := Together(context.Background(), cuts...); err != nil {
		return err
	}
	for _, p := range parts {
		if p.v.durable(); p.s != nil {
			p.s.pending, p.s.img = false, maps.Clone(p.v.now)
		}
	}
	return nil
}

// snap chooses a snapshot.
func (w *model) snap(a, b uint64) (*mvol, *msnap) {
	v := w.vol(a)
	if v == nil || len(v.snaps) == 0 {
		return v, nil
	}
	return v, v.snaps[b%uint64(len(v.snaps))]
}

func (w *model) drop(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil {
		return nil
	}
	s.dropping = true
	var err error
	if v.r != nil {
		err = v.r.DropSnapshot(s.uid)
	} else {
		err = w.d.DropSnapshot(v.uid, s.uid)
	}
	if err == nil {
		v.snaps = slices.DeleteFunc(v.snaps, func(o *msnap) bool { return o == s })
	}
	return err
}

func (w *model) chain(v *mvol, s *msnap) ([]string, error) {
	m, err := w.meta(v)
	if err != nil {
		return nil, err
	}
	k := slices.IndexFunc(m.Snapshots, func(o Snapshot) bool { return o.UID == s.uid })
	if k < 0 {
		return nil, fmt.Errorf("snapshot %s is not in the stack", s.uid)
	}
	return m.Chain(m.Snapshots[k].Layer)
}

func (w *model) clone(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil || len(w.vols) >= maxVols {
		return nil
	}
	layers, err := w.chain(v, s)
	if err != nil {
		return err
	}
	size := s.size
	if d.C%3 == 0 {
		size = largeSize
	}
	return w.make(newVol(string(api.NewUID()), size, s.img), layers)
}

func (w *model) revert(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil {
		return nil
	}
	if err := w.close(v); err != nil {
		return err
	}
	m, err := w.d.Stack(v.uid)
	if err != nil {
		return err
	}
	v.head, v.target = m.Head, maps.Clone(s.img)
	err = w.d.Revert(context.Background(), v.uid, s.uid, 0)
	if w.p.fs.Killed() {
		return err
	}
	if err == nil {
		v.now = v.target
		v.durable()
	}
	v.head, v.target = "", nil
	if api.Is(err, api.Busy) {
		return nil
	}
	return err
}

func (w *model) expand(d deed) error {
	v := w.vol(d.A)
	if v == nil || v.size == largeSize {
		return nil
	}
	if err := w.open(v); err != nil {
		return err
	}
	v.grow = min(largeSize, v.size+int64(1+d.B%20000)<<blockBits)
	if d.C%2 == 0 {
		v.grow = largeSize
	}
	err := v.r.Expand(context.Background(), v.grow)
	if err == nil {
		v.size, v.grow = v.grow, 0
	}
	return err
}

func (w *model) remove(d deed) error {
	v := w.vol(d.A)
	if v == nil {
		return nil
	}
	if err := w.close(v); err != nil {
		return err
	}
	v.removing = true
	err := w.d.RemoveReplica(v.uid)
	if err == nil {
		w.vols = slices.DeleteFunc(w.vols, func(o *mvol) bool { return o == v })
	}
	return err
}

func (w *model) closeOne(d deed) error {
	v := w.vol(d.A)
	if v == nil {
		return nil
	}
	return w.close(v)
}

// restart ends the process in order and starts the next process.
func (w *model) restart(deed) error {
	for _, r := range w.readers {
		if err := r.src.Close(); err != nil {
			return err
		}
	}
	w.readers = nil
	for _, v := range w.vols {
		if err := w.close(v); err != nil {
			return err
		}
	}
	d, err := openModel(w.p.fs, w.p.root)
	if err == nil {
		w.d = d
	}
	return err
}

// layers returns the finished or the unfinished layers of a volume, bottom first.
func (w *model) layers(v *mvol, finished bool) ([]string, error) {
	m, err := w.meta(v)
	if err != nil {
		return nil, err
	}
	var list []string
	for _, uid := range m.AllLayers() {
		if is, err := w.d.Exists(w.d.Join(layer.Dir, uid, layer.LayerFile)); err != nil {
			return nil, err
		} else if is == finished {
			list = append(list, uid)
		}
	}
	return list, nil
}

func (w *model) finish(d deed) error {
	v := w.vol(d.A)
	if v == nil {
		return nil
	}
	list, err := w.layers(v, false)
	if err != nil || len(list) == 0 {
		return err
	}
	if d.B%2 == 0 {
		list = list[d.C%uint64(len(list)):][:1]
	}
	for _, uid := range list {
		if err := w.d.Finish(context.Background(), uid); err != nil && !api.Is(err, api.Busy) {
			return err
		}
	}
	return nil
}

// patience is a context which ends after some calls of Err.
type patience struct {
	context.Context
	looks int
}

var errPatience = errors.New("no more patience")

func (p *patience) Err() error {
	if p.looks--; p.looks < 0 {
		return errPatience
	}
	return nil
}

func (w *model) merge(d deed) error {
	v := w.vol(d.A)
	if v == nil {
		return nil
	}
	if err := w.open(v); err != nil {
		return err
	}
	var ctx context.Context
	if ctx = context.Background(); d.B%2 == 0 {
		ctx = &patience{ctx, int(d.C % 5)}
	}
	for {
		did, err := v.r.Merge(ctx, MergeOptions{})
		if errors.Is(err, errPatience) || api.Is(err, api.Busy) {
			return nil
		}
		if err != nil || !did {
			return err
		}
	}
}

// image records a snapshot's layers as an image.
func (w *model) image(d deed) error {
	v, s := w.snap(d.A, d.B)
	if s == nil || len(w.images) >= 3 {
		return nil
	}
	layers, err := w.chain(v, s)
	if err != nil {
		return err
	}
	for _, uid := range layers {
		if is, err := w.d.Exists(w.d.Join(layer.Dir, uid, layer.LayerFile)); err != nil || !is {
			return err // frozen
		}
	}
	i := &mimage{rec: block.Image{UID: string(api.NewUID()), Name: "i", Layers: layers, VirtualSize: s.size},
		size: s.size, img: s.img, open: true}
	w.images = append(w.images, i)
	err = w.d.PutImage(i.rec)
	if api.Is(err, api.Busy) && !w.p.fs.Killed() {
		w.images = w.images[:len(w.images)-1]
		return nil
	}
	if err == nil {
		i.open = false
	}
	return err
}
