package longhorn

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strconv"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

const (
	valueLimit = 1 << 20 // bytes of a cfg without its blocks
	firstRead  = 64 << 10
	laterRead  = 4 << 20
	depthLimit = 8
)

// objectReader reads an object in ranges.
type objectReader struct {
	ctx       context.Context
	store     target.Store
	name      string
	off, size int64
	buffer    []byte
	// left is how many bytes the decoder may read until the next whole value of a list: a decoder keeps a value in memory.
	left int64
}

func (r *objectReader) Read(p []byte) (int, error) {
	if r.left <= 0 {
		return 0, api.Errorf(api.Corrupt, "a value has more than %d bytes", valueLimit)
	}
	if len(r.buffer) == 0 {
		if r.off == r.size {
			return 0, io.EOF
		}
		n := int64(laterRead)
		if r.off == 0 {
			n = firstRead
		}
		b, err := r.store.Get(r.ctx, r.name, r.off, min(n, r.size-r.off))
		if err != nil {
			return 0, err
		}
		if len(b) == 0 {
			return 0, io.ErrUnexpectedEOF
		}
		r.off += int64(len(b))
		r.buffer = b
	}
	n := copy(p[:min(int64(len(p)), r.left)], r.buffer)
	r.buffer, r.left = r.buffer[n:], r.left-int64(n)
	return n, nil
}

// errStop ends the decoding of an object whose rest is not needed.
var errStop = errors.New("stop")

// decodeObject reads a JSON object of at most limit bytes from the store, and calls each with every key. each reads the
// value of the key from the decoder. Errors of the JSON are of kind Corrupt.
func decodeObject(ctx context.Context, store target.Store, name string, limit int64,
	each func(d *decoder, key string) error) error {
	o, err := store.Stat(ctx, name)
	if err != nil {
		return err
	}
	if o.Size < 2 || o.Size > limit {
		return api.Errorf(api.Corrupt, "object %s: has %d bytes; 2 to %d are allowed", name, o.Size, limit)
	}
	r := &objectReader{ctx: ctx, store: store, name: name, size: o.Size, left: valueLimit}
	d := &decoder{json.NewDecoder(r), r}
	err = d.object(each)
	switch {
	case err == nil:
		_, err = d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.Join(errors.New("bytes follow the JSON"), err)
	case errors.Is(err, errStop):
		return nil
	}
	kind := api.KindOf(err)
	if kind == api.Invalid || kind == api.Other && ctx.Err() == nil { // too short, or no JSON of this form
		kind = api.Corrupt
	}
	return api.Errorf(kind, "object %s: %w", name, err)
}

// decoder reads values one by one, so that its memory does not depend on the size of the object.
type decoder struct {
	*json.Decoder
	reader *objectReader
}

func (d *decoder) expect(want json.Delim) error {
	t, err := d.Token()
	if err == nil && t != want {
		err = errors.New("the JSON has another structure")
	}
	return err
}

func (d *decoder) object(each func(d *decoder, key string) error) error {
	if err := d.expect('{'); err != nil {
		return err
	}
	seen := map[string]struct{}{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return err
		}
		key, _ := t.(string)
		if _, twice := seen[key]; twice || len(seen) == 256 {
			return errors.New("the JSON has a key twice, or more than 256 keys")
		}
		seen[key] = struct{}{}
		if err := each(d, key); err != nil {
			return err
		}
	}
	return d.expect('}')
}

// skip reads a value of limited depth and drops the value.
func (d *decoder) skip() error {
	depth := 0
	for {
		t, err := d.Token()
		if err != nil {
			return err
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth > depthLimit {
			return errors.New("the JSON is nested too deeply")
		}
		if depth == 0 {
			return nil
		}
	}
}

// list reads a list of values of bounded size; null is an empty list.
func (d *decoder) list(each func() error) error {
	t, err := d.Token()
	if err != nil || t == nil {
		return err
	}
	if t != json.Delim('[') {
		return errors.New("the JSON has another structure")
	}
	for d.More() {
		d.reader.left = valueLimit
		if err := each(); err != nil {
			return err
		}
	}
	return d.expect(']')
}

// number reads a decimal number that is written as a string.
func (d *decoder) number(to *int64) error {
	var text string
	if err := d.Decode(&text); err != nil || text == "" {
		return err
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err == nil && n < 0 {
		err = errors.New("a number is negative")
	}
	*to = n
	return err
}

// nested reads a string that is encoded twice, or once.
func (d *decoder) nested(to *string) error {
	if err := d.Decode(to); err != nil {
		return err
	}
	if len(*to) > 0 && (*to)[0] == '"' {
		return json.Unmarshal([]byte(*to), to)
	}
	return nil
}

// labels reads an object of strings.
func (d *decoder) labels(to *map[string]string) error {
	var m map[string]*string
	if err := d.Decode(&m); err != nil {
		return err
	}
	for key, value := range m {
		if value == nil {
			continue
		}
		if *to == nil {
			*to = map[string]string{}
		}
		(*to)[key] = *value
	}
	return nil
}
