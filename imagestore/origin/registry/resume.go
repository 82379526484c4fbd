package registry

import (
	"archive/tar"
	"bufio"
	"encoding"
	"encoding/json"
	"io"
	"maps"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/origin"
)

// Another process can continue the transfer of a plain layer: the place in the disk file follows from the place in the
// blob and the state of the digest there. No decoder can begin in the middle of a packed layer, so the transfer of such
// a layer starts again.

// resumeState is the record of a place in the disk file.
type resumeState struct {
	Layers []string    `json:"layers"` // of the image, the lowest first
	Open   int         `json:"open"`   // index of the layer with the disk
	Walk   searchState `json:"walk"`
	Size   int64       `json:"size"`  // of the disk file
	Start  int64       `json:"start"` // of the disk file in the layer
	Off    int64       `json:"off"`   // of the next byte in the blob
	Sum    []byte      `json:"sum"`   // state of the digest at Off
	// Earlier versions recorded a place in a packed layer.
	Point json.RawMessage `json:"point,omitempty"`
}

// searchState is the record of a diskSearch.
type searchState struct {
	Found   string   `json:"found"`
	Hidden  []string `json:"hidden,omitempty"`
	Closed  bool     `json:"closed,omitempty"`
	Seen    []string `json:"seen,omitempty"`
	Headers int      `json:"headers"`
	Beside  int64    `json:"beside"`
	Hides   []string `json:"hides,omitempty"`
	Closes  bool     `json:"closes,omitempty"`
}

// maxRecordedNames bounds the recorded names of hidden files; with more names the transfer cannot be continued.
const maxRecordedNames = 1000

// resumePoint is the constant part of all records of a transfer.
type resumePoint struct {
	state  resumeState // without Off and Sum
	states *origin.HashStates
}

// countingReader counts the bytes of an archive.
type countingReader struct {
	r io.Reader
	n int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// setResumePoint prepares the records after the disk file was found.
func (d *diskStream) setResumePoint(size int64) {
	if d.at.plain != nil || len(d.search.hidden)+len(d.search.hides) > maxRecordedNames {
		return
	}
	w := &d.search
	st := resumeState{Layers: digestsOf(d.all), Open: len(d.layers), Size: size, Start: d.at.files.n}
	st.Walk = searchState{Found: w.found,
		Hidden: slices.Sorted(maps.Keys(w.hidden)), Closed: w.closed, Seen: slices.Clone(w.seen), Headers: w.headers,
		Beside: w.beside, Hides: slices.Clone(w.hides), Closes: w.closes}
	d.resumable = &resumePoint{state: st, states: &d.at.blob.states}
}

func digestsOf(layers []v1.Descriptor) []string {
	var out []string
	for _, l := range layers {
		out = append(out, l.Digest.String())
	}
	return out
}

// stateAt is origin.Stream.At.
func (o *resumePoint) stateAt(off int64) (state json.RawMessage, ok bool) {
	st := o.state
	m, ok := o.states.Before(st.Start + off)
	if !ok {
		return nil, false
	}
	st.Off, st.Sum = m.Off, m.Sum
	state, err := json.Marshal(st)
	return state, err == nil
}

// resumeDisk advances to the place of an earlier transfer, if the registry has the same image.
func (d *diskStream) resumeDisk() (size int64, err error) {
	from := d.c.opts.From
	var st resumeState
	if err := json.Unmarshal(from.State, &st); err != nil || st.Point != nil || st.Size != from.Mark.Size ||
		from.Mark.Off > st.Size ||
		st.Start < 0 || st.Off < 0 || st.Open < 0 || st.Open >= len(d.all) || !slices.Equal(digestsOf(d.all), st.Layers) {
		return 0, d.errChanged()
	}
	w := st.Walk
	d.search = diskSearch{image: d.c.name, found: w.Found, hidden: map[string]bool{}, closed: w.Closed, seen: w.Seen,
		headers: w.Headers, beside: w.Beside, hides: w.Hides, closes: w.Closes}
	for _, name := range w.Hidden {
		d.search.hidden[name] = true
	}
	d.layers = d.all[:st.Open]
	b, stop, err := d.openBlob(d.all[st.Open], st.Off, st.Sum)
	if err != nil {
		return 0, err
	}
	d.at = &layer{blob: b, stop: stop, buf: bufio.NewReaderSize(b, bufferSize)}
	if err := d.enterLayer(&st, from.Mark.Off); err != nil {
		return 0, d.explainDamage(err)
	}
	d.resumable = &resumePoint{state: st, states: &b.states}
	d.resumable.state.Sum = nil
	return st.Size, nil
}

// enterLayer advances to a place of the disk file in the open layer.
func (d *diskStream) enterLayer(st *resumeState, off int64) error {
	l := d.at
	if _, err := io.CopyN(io.Discard, l.buf, st.Start+off-st.Off); err != nil {
		return err
	}
	l.files = &countingReader{r: l.buf, n: st.Start + off}
	// The rest of the file is read by hand, with what fills up its last block; then comes a header.
	l.left, l.fill = st.Size-off, -st.Size&(tarBlock-1)
	l.tar = tar.NewReader(l.files)
	return nil
}

// errChanged is the error for a changed image or an unusable record.
func (d *diskStream) errChanged() error {
	return api.Errorf(api.Unavailable, "%s: the image %w in the registry, or the checkpoint of the import cannot be "+
		"used", d.c.name, origin.ErrChanged)
}

// restoreAt starts a blob at a place, with the state of the digest there.
func (b *blob) restoreAt(off int64, sum []byte) error {
	u, ok := b.sum.(encoding.BinaryUnmarshaler)
	if !ok || off > b.want.Size || u.UnmarshalBinary(sum) != nil {
		return api.Errorf(api.Unavailable, "%s: layer %s %w, or the checkpoint of the import cannot "+
			"be used", b.c.name, b.want.Digest, origin.ErrChanged)
	}
	b.off = off
	return nil
}
