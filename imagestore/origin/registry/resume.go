package registry

import (
	"archive/tar"
	"bufio"
	"encoding"
	"encoding/json"
	"io"
	"maps"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Another process can continue a transfer whose layer is not packed: at a place in the disk file that is known by the
// place in the blob and the state of the blob's digest there. No decoder can begin in the middle of a packed layer, so
// the transfer of such a layer begins again.

// diskState is what is to be recorded of such a place.
type diskState struct {
	Layers []string  `json:"layers"` // of the image, the lowest first
	Open   int       `json:"open"`   // which of them it is in
	Walk   walkState `json:"walk"`
	Size   int64     `json:"size"`  // of the disk file,
	Start  int64     `json:"start"` // and where it begins in the layer
	Off    int64     `json:"off"`   // where to go on in the blob,
	Sum    []byte    `json:"sum"`   // and the state of its digest there
	// Earlier versions recorded a place in a packed layer.
	Point json.RawMessage `json:"point,omitempty"`
}

// walkState is a walk.
type walkState struct {
	Found   string   `json:"found"`
	Hidden  []string `json:"hidden,omitempty"`
	Closed  bool     `json:"closed,omitempty"`
	Seen    []string `json:"seen,omitempty"`
	Headers int      `json:"headers"`
	Beside  int64    `json:"beside"`
	Hides   []string `json:"hides,omitempty"`
	Closes  bool     `json:"closes,omitempty"`
}

// mostNames is how many names of hidden files are recorded at most: where there are more, the transfer begins anew.
const mostNames = 1000

// resumePoint is where the disk file comes from. It does not change.
type resumePoint struct {
	state  diskState // without a place
	states *origin.HashStates
}

// counted tells how far an archive was read.
type counted struct {
	r io.Reader
	n int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// remember makes the origin of the disk file that was just found.
func (d *disk) remember(size int64) {
	if d.at.plain != nil || len(d.walk.hidden)+len(d.walk.hides) > mostNames {
		return
	}
	w := &d.walk
	st := diskState{Layers: digests(d.all), Open: len(d.layers), Size: size, Start: d.at.files.n}
	st.Walk = walkState{Found: w.found,
		Hidden: slices.Sorted(maps.Keys(w.hidden)), Closed: w.closed, Seen: slices.Clone(w.seen), Headers: w.headers,
		Beside: w.beside, Hides: slices.Clone(w.hides), Closes: w.closes}
	d.origin = &resumePoint{state: st, states: &d.at.blob.states}
}

func digests(layers []descriptor) []string {
	var out []string
	for _, l := range layers {
		out = append(out, l.Digest.String())
	}
	return out
}

// place is origin.Stream.At.
func (o *resumePoint) place(off int64) (state json.RawMessage, ok bool) {
	st := o.state
	m, ok := o.states.Before(st.Start + off)
	if !ok {
		return nil, false
	}
	st.Off, st.Sum = m.Off, m.Sum
	state, err := json.Marshal(st)
	return state, err == nil
}

// again goes to where an earlier transfer was, if the registry has the same image.
func (d *disk) again() (size int64, err error) {
	from := d.c.opts.From
	var st diskState
	if err := json.Unmarshal(from.State, &st); err != nil || st.Point != nil || st.Size != from.Mark.Size ||
		from.Mark.Off > st.Size ||
		st.Start < 0 || st.Off < 0 || st.Open < 0 || st.Open >= len(d.all) || !slices.Equal(digests(d.all), st.Layers) {
		return 0, d.anew()
	}
	w := st.Walk
	d.walk = walk{image: d.c.name, found: w.Found, hidden: map[string]bool{}, closed: w.Closed, seen: w.Seen,
		headers: w.Headers, beside: w.Beside, hides: w.Hides, closes: w.Closes}
	for _, name := range w.Hidden {
		d.walk.hidden[name] = true
	}
	d.layers = d.all[:st.Open]
	b, stop, err := d.blob(d.all[st.Open], st.Off, st.Sum)
	if err != nil {
		return 0, err
	}
	d.at = &layer{blob: b, stop: stop, buf: bufio.NewReaderSize(b, bufferSize)}
	if err := d.enter(&st, from.Mark.Off); err != nil {
		return 0, d.explain(err)
	}
	d.origin = &resumePoint{state: st, states: &b.states}
	d.origin.state.Sum = nil
	return st.Size, nil
}

// enter goes to a place of the disk file in the open layer.
func (d *disk) enter(st *diskState, off int64) error {
	l := d.at
	if _, err := io.CopyN(io.Discard, l.buf, st.Start+off-st.Off); err != nil {
		return err
	}
	l.files = &counted{r: l.buf, n: st.Start + off}
	// The rest of the file is read by hand, with what fills up its last block; then comes a header.
	l.left, l.fill = st.Size-off, -st.Size&(tarBlock-1)
	l.tar = tar.NewReader(l.files)
	return nil
}

// anew is the error for what is not the same any more.
func (d *disk) anew() error {
	return api.Errorf(api.Unavailable, "%s: the image %w in the registry, or what was kept of it cannot be used", d.c.name,
		origin.ErrChanged)
}

// enter begins a blob at a place, with the state of its digest there.
func (b *blob) enter(off int64, sum []byte) error {
	u, ok := b.sum.(encoding.BinaryUnmarshaler)
	if !ok || off > b.want.Size || u.UnmarshalBinary(sum) != nil {
		return api.Errorf(api.Unavailable, "%s: layer %s %w, or what was kept of it cannot be used", b.c.name, b.want.Digest,
			origin.ErrChanged)
	}
	b.off = off
	return nil
}
