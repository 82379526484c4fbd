package archive

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"

	"drover.io/drover/api"
)

// The gzip container (RFC 1952).
const (
	gzipMagic   = "\x1f\x8b"
	gzipCRC     = 1 << 1
	gzipExtra   = 1 << 2
	gzipName    = 1 << 3
	gzipComment = 1 << 4
	gzipUnknown = 0xe0
	gzipWindow  = 32 << 10
)

// gunzip decodes one member after the other. Zeros after the last one are padding, as for the gzip program: archives
// that were on tapes have them.
func gunzip(u *unpacker) error {
	g, err := u.ring(gzipWindow, gzipWindow)
	if err != nil {
		return err
	}
	defer close(g.out)
	d := &inflater{in: u.in, g: g, mark: u.gzipPlace}
	for middle := u.from != nil; ; middle = false {
		if middle {
			err = u.gzipAgain(d)
		} else if err = gzipHeader(u.in); err == nil {
			d.bits, d.n, g.have = 0, 0, int64(g.sent-g.pos)
			g.begin(crc32.NewIEEE())
		}
		if err != nil {
			return err
		}
		start := g.total - g.have
		if err := d.inflate(); err != nil {
			return err
		}
		if err := g.commit(); err != nil {
			return err
		}
		tail, err := u.in.next(8)
		if err != nil {
			return err
		}
		if uint32(g.total-start) != binary.LittleEndian.Uint32(tail[4:]) {
			return u.in.damaged("the length does not match: %w", ErrChecksum)
		}
		g.end([]byte{tail[3], tail[2], tail[1], tail[0]}, u.in.name)
		more, err := gzipNext(u.in)
		if err != nil || !more {
			return err
		}
	}
}

// gzipState is what is known between two blocks.
type gzipState struct {
	Have int64 `json:"have"` // bytes of the member
	Bit  uint  `json:"bit"`  // where the next block begins in its first byte
}

// gzipPlace tells of a place between two blocks.
func (u *unpacker) gzipPlace(d *inflater) error {
	g := d.g
	if !u.due(u.total.Load() + int64(g.pos-g.sent)) {
		return nil
	}
	if err := g.commit(); err != nil {
		return err
	}
	g.place(&place{packed: u.in.off - int64(d.n+7)/8, plain: u.total.Load(), window: min(g.have, gzipWindow),
		know: gzipState{Have: g.have, Bit: -d.n & 7}})
	return nil
}

// gzipAgain goes to where an earlier reader was.
func (u *unpacker) gzipAgain(d *inflater) error {
	var st gzipState
	state, err := u.restore(&st)
	if err != nil {
		return err
	}
	sum, err := u.resumed(crc32.NewIEEE(), state)
	if err == nil {
		err = u.refill(d.g, st.Have)
	}
	if err != nil {
		return err
	}
	d.g.begin(sum)
	return d.take(st.Bit & 7)
}

// gzipNext tells whether another member follows.
func gzipNext(in *input) (bool, error) {
	padded := false
	for {
		end, err := in.atEnd()
		if err != nil || end {
			return false, err
		}
		if in.buf[in.pos] != 0 {
			break
		}
		padded = true
		in.skip(1)
	}
	if !in.need(2) && !errors.Is(in.err, io.EOF) {
		return false, in.err
	}
	if padded || in.end-in.pos < 2 || string(in.buf[in.pos:in.pos+2]) != gzipMagic {
		return false, in.trailing()
	}
	return true, nil
}

func gzipHeader(in *input) error {
	sum := crc32.NewIEEE()
	take := func(n int) ([]byte, error) {
		b, err := in.next(n)
		_, _ = sum.Write(b)
		return b, err
	}
	head, err := take(10)
	if err != nil {
		return err
	}
	flags := head[3]
	if string(head[:2]) != gzipMagic {
		return in.damaged("this is not the start of a gzip member")
	}
	if head[2] != 8 || flags&gzipUnknown != 0 {
		return api.Errorf(api.Unsupported, "gzip: method %d with flags %#x is not supported", head[2], flags)
	}
	if flags&gzipExtra != 0 {
		n, err := take(2)
		if err != nil {
			return err
		}
		if _, err := take(int(binary.LittleEndian.Uint16(n))); err != nil {
			return err
		}
	}
	for _, text := range []byte{gzipName, gzipComment} {
		for flags&text != 0 {
			b, err := take(1)
			if err != nil {
				return err
			}
			if b[0] == 0 {
				break
			}
		}
	}
	if flags&gzipCRC != 0 {
		want := uint16(sum.Sum32())
		b, err := take(2)
		if err != nil {
			return err
		}
		if binary.LittleEndian.Uint16(b) != want {
			return in.damaged("the header is damaged: %w", ErrChecksum)
		}
	}
	return nil
}
