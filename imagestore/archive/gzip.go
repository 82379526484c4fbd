package archive

import (
	"bufio"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"

	"drover.io/drover/api"
)

const (
	gzipMagic   = "\x1f\x8b"
	gzipUnknown = 0xe0 // reserved flags
)

// gunzip decodes one member after the other. Zeros after the last member are padding, as for the gzip program: archives
// from tapes have such padding.
type gunzip struct {
	in     *bufio.Reader
	z      *gzip.Reader
	member bool // z is inside a member
}

func newGunzip(r io.Reader) (decoder, error) {
	g := &gunzip{in: bufio.NewReaderSize(r, chunkSize), z: new(gzip.Reader)}
	return g, g.openMember()
}

// openMember begins a member.
func (g *gunzip) openMember() error {
	if head, err := g.in.Peek(4); err == nil && (head[2] != 8 || head[3]&gzipUnknown != 0) {
		return api.Errorf(api.Unsupported, "gzip: method %d with flags %#x is not supported", head[2], head[3])
	}
	err := g.z.Reset(g.in)
	switch {
	case errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	case errors.Is(err, gzip.ErrHeader):
		return api.Errorf(api.Corrupt, "gzip: the header of a member is damaged, or its name is too long")
	}
	g.z.Multistream(false)
	g.member = err == nil
	return err
}

func (g *gunzip) Read(p []byte) (int, error) {
	for {
		if !g.member {
			if err := g.nextMember(); err != nil {
				return 0, err
			}
		}
		n, err := g.z.Read(p)
		if errors.Is(err, io.EOF) {
			g.member, err = false, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// nextMember begins the next member; io.EOF after the last member.
func (g *gunzip) nextMember() error {
	padded := false
	for {
		b, err := g.in.Peek(1)
		if err != nil {
			return err
		}
		if b[0] != 0 {
			break
		}
		padded = true
		_, _ = g.in.Discard(1)
	}
	head, err := g.in.Peek(len(gzipMagic))
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if padded || string(head) != gzipMagic {
		return trailingError(Gzip)
	}
	return g.openMember()
}

func (g *gunzip) Close() {}
