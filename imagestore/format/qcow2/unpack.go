package qcow2

import (
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"

	"drover.io/drover/imagestore/format/inflate"
)

// window is the size of one read of compressed data, over adjacent compressed clusters.
const window = 1 << 20

// unpackers are buffers for one reader at a time, independent of images.
var unpackers = sync.Pool{New: func() any { return new(unpacker) }}

type unpacker struct {
	buf     []byte // compressed bytes of the file, from off on
	off     int64
	inflate inflate.Decoder
	zstd    *zstd.Decoder
	plain   []byte // output of zstd
}

func (u *unpacker) reset() { u.buf = u.buf[:0] }

// unpackCluster fills to, which starts at off, from the compressed cluster of m. The caller reads rest bytes from off,
// so that unpackCluster can fetch the data of the next clusters as well.
func (im *Image) unpackCluster(u *unpacker, m mapping, to []byte, off, rest int64) error {
	number, in := off>>im.h.clusterBits, off&(im.cluster-1)
	if int64(len(to)) == im.cluster {
		return im.unpackTo(u, m, to, off, rest)
	}
	b, ok := im.clusters.get(number)
	if !ok {
		b = make([]byte, im.cluster)
		if err := im.unpackTo(u, m, b, off, rest); err != nil {
			return err
		}
		im.clusters.put(number, b)
	}
	copy(to, b[in:])
	return nil
}

func (im *Image) unpackTo(u *unpacker, m mapping, to []byte, off, rest int64) error {
	src, err := im.readPacked(u, m, off, rest)
	if err != nil {
		return err
	}
	var used int
	if im.h.compression == compressZstd {
		used, err = u.decodeZstd(to, src)
	} else {
		used, err = u.inflate.Fill(to, src)
	}
	if err != nil {
		return corrupt("compressed data at %#x: %w", m.host, err)
	}
	if im.drop != nil {
		im.drop(m.host, int64(used))
	}
	return nil
}

// readPacked returns the compressed data of m, read together with the data of the clusters behind.
func (im *Image) readPacked(u *unpacker, m mapping, off, rest int64) ([]byte, error) {
	if at := m.host - u.off; at >= 0 && at+m.bytes <= int64(len(u.buf)) {
		return u.buf[at : at+m.bytes], nil
	}
	end := m.host + m.bytes
	for m.n < rest {
		off, rest = off+m.n, rest-m.n
		next, _, err := im.findMapping(off, rest)
		// Writers put clusters one behind the other; a cluster often begins in the last sector of the cluster before.
		if err != nil || !next.packed || next.host > end || next.host < m.host || next.host+next.bytes-m.host > window {
			break
		}
		end = max(end, next.host+next.bytes)
		m.n = next.n
	}
	n := int(end - m.host)
	if cap(u.buf) < n {
		u.buf = make([]byte, max(n, window))
	}
	u.buf, u.off = u.buf[:n], m.host
	if im.fileSize != unknownSize {
		err := im.readFull(u.buf, m.host, "compressed data")
		if err != nil {
			u.reset()
		}
		return u.buf[:min(m.bytes, int64(len(u.buf)))], err
	}
	// The last sector of the file need not be there in full.
	n, err := im.r.ReadAt(u.buf, m.host)
	u.buf = u.buf[:n]
	if err != nil && !errors.Is(err, io.EOF) {
		u.reset()
		return nil, fmt.Errorf("read compressed data at %#x: %w", m.host, err)
	}
	return u.buf[:min(m.bytes, int64(n))], nil
}

// zstdSlack is room behind the output for the fast path of the decoder: a block and its overshoot.
const zstdSlack = 128<<10 + 64

var (
	errZstdShort = errors.New("zstd data ends too early")
	errZstdData  = errors.New("bad zstd data")
)

// decodeZstd fills dst from the zstd frames at the start of src, and returns the length of the frames. Bytes behind the
// frames are ignored: the last sector of a compressed cluster may hold the next cluster.
func (u *unpacker) decodeZstd(dst, src []byte) (used int, err error) {
	if u.zstd == nil {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true),
			zstd.WithDecoderMaxWindow(1<<27))
		if err != nil {
			return 0, fmt.Errorf("start zstd decoder: %w", err)
		}
		u.zstd = d
	}
	for n := 0; n < len(dst); {
		size, err := frameSize(src)
		if err != nil {
			return 0, err
		}
		// The decoder is faster where it may write a little beyond its output, so it gets a buffer of its own.
		if want := len(dst) + zstdSlack; cap(u.plain) < want {
			u.plain = make([]byte, 0, want)
		}
		out, err := u.zstd.DecodeAll(src[:size], u.plain[:0:len(dst)-n+zstdSlack])
		if err != nil {
			return 0, fmt.Errorf("%w: %w", errZstdData, err)
		}
		if len(out) > len(dst)-n {
			return 0, errZstdData
		}
		n += copy(dst[n:], out)
		src = src[size:]
		used += size
	}
	return used, nil
}

// frameSize returns the size of the zstd frame at the start of src (RFC 8878).
func frameSize(src []byte) (int, error) {
	var h zstd.Header
	if err := h.Decode(src); err != nil {
		return 0, fmt.Errorf("%w: %w", errZstdShort, err)
	}
	at := h.HeaderSize
	if h.Skippable {
		if at += int(h.SkippableSize); at > len(src) || at < 0 {
			return 0, errZstdShort
		}
		return at, nil
	}
	for last := false; !last; {
		if len(src)-at < 3 {
			return 0, errZstdShort
		}
		b := uint32(binary.LittleEndian.Uint16(src[at:])) | uint32(src[at+2])<<16
		at += 3
		last = b&1 != 0
		switch n := int(b >> 3); b >> 1 & 3 {
		case 1:
			at++
		case 3:
			return 0, errZstdData
		default:
			at += n
		}
		if at > len(src) {
			return 0, errZstdShort
		}
	}
	if h.HasCheckSum {
		at += 4
	}
	if at > len(src) {
		return 0, errZstdShort
	}
	return at, nil
}

// cache keeps the most recently used byte slices, up to a number of bytes and at least one slice. Slices must not be
// changed, and stay valid after the cache drops them.
type cache struct {
	limit int64
	mu    sync.Mutex
	size  int64
	items map[int64]*list.Element
	order list.List // most recent first
}

type cached struct {
	key int64
	b   []byte
}

func newCache(limit int64) *cache { return &cache{limit: limit, items: map[int64]*list.Element{}} }

func (c *cache) get(key int64) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.items[key]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(cached).b, true
}

func (c *cache) put(key int64, b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.items[key]; ok {
		return
	}
	c.items[key] = c.order.PushFront(cached{key, b})
	c.size += int64(len(b))
	for c.size > c.limit && c.order.Len() > 1 {
		old := c.order.Remove(c.order.Back()).(cached)
		c.size -= int64(len(old.b))
		delete(c.items, old.key)
	}
}

func (c *cache) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.size, c.items = 0, map[int64]*list.Element{}
	c.order.Init()
}
