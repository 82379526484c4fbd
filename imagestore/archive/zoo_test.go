package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

func crc(b []byte) uint32 { return crc32.ChecksumIEEE(b) }

var le = binary.LittleEndian

// bitWriter writes numbers of a given number of bits, lowest first.
type bitWriter struct {
	b []byte
	n uint
}

func (w *bitWriter) put(v uint32, n uint) *bitWriter {
	for range n {
		if w.n%8 == 0 {
			w.b = append(w.b, 0)
		}
		w.b[len(w.b)-1] |= byte(v&1) << (w.n % 8)
		v >>= 1
		w.n++
	}
	return w
}

// gz puts deflate data into a fitting member.
func gz(deflated, plain []byte) []byte {
	b := append([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"), deflated...)
	return le.AppendUint32(le.AppendUint32(b, crc(plain)), uint32(len(plain)))
}

// xzFile makes a file of a single block. header is the block's header without size, padding and CRC.
func xzFile(check byte, header, packed, sum []byte, plain int) []byte {
	head := append([]byte{0}, header...)
	for len(head)%4 != 0 {
		head = append(head, 0)
	}
	head[0] = byte(len(head) / 4)
	b := xzStart(check)
	b = le.AppendUint32(append(b, head...), crc(head))
	b = append(b, packed...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	b = append(b, sum...)
	return xzEnd(b, check, len(head)+4+len(packed)+len(sum), plain)
}

func xzStart(check byte) []byte {
	b := append([]byte(xzMagic), 0, check)
	return le.AppendUint32(b, crc(b[6:8]))
}

// xzEnd appends an index of pairs of numbers, and the footer.
func xzEnd(b []byte, check byte, records ...int) []byte {
	index := []byte{0, byte(len(records) / 2)}
	for _, n := range records {
		for ; n >= 0x80; n >>= 7 {
			index = append(index, byte(n)|0x80)
		}
		index = append(index, byte(n))
	}
	for len(index)%4 != 0 {
		index = append(index, 0)
	}
	index = le.AppendUint32(index, crc(index))
	foot := append(le.AppendUint32(nil, uint32(len(index)/4-1)), 0, check)
	b = append(bytes.Clone(b), index...)
	return append(append(le.AppendUint32(b, crc(foot)), foot...), "YZ"...)
}

// zs makes a frame of blocks, without checksum; window is the window descriptor.
func zs(window byte, blocks ...[]byte) []byte {
	b := append(le.AppendUint32(nil, zstdMagic), 0, window)
	for i, block := range blocks {
		kind, last := uint32(2), uint32(0)
		if i == len(blocks)-1 {
			last = 1
		}
		n := uint32(len(block))<<3 | kind<<1 | last
		b = append(append(b, byte(n), byte(n>>8), byte(n>>16)), block...)
	}
	return b
}

// edit returns a changed copy.
func edit(b []byte, f func([]byte)) []byte {
	b = bytes.Clone(b)
	f(b)
	return b
}

var (
	plainLZMA2 = []byte{0x01, 0, 4, 'h', 'e', 'l', 'l', 'o', 0}
	lzma2Small = []byte{0, 0x21, 1, 0} // flags, LZMA2, a dictionary of 4 KiB
)

// TestZoo: damaged and hostile archives, and the error of each.
func TestZoo(t *testing.T) {
	text := samples(t)["text"][:50000]
	g := run(t, text, "gzip", "-nc")
	x := run(t, text, "xz", "-c")
	xs := run(t, text, "xz", "-c", "--check=sha256")
	x32 := run(t, text, "xz", "-c", "--check=crc32")
	xm := run(t, text, "xz", "-c", "-T2", "--block-size=20000")
	z := run(t, text, "zstd", "-c")
	path := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	zf := run(t, nil, "zstd", "-c", path)
	hello := []byte("hello")
	good := xzFile(0, lzma2Small, plainLZMA2, nil, 5)
	mustUnpack(t, good, hello)
	mustUnpack(t, gz(new(bitWriter).put(1, 1).put(1, 2).put(0, 7).b, nil), nil)
	rawLiterals := []byte{5 << 3, 'h', 'e', 'l', 'l', 'o', 0}
	mustUnpack(t, zs(0, rawLiterals), hello)

	const bad, unsupported = api.Corrupt, api.Unsupported
	zoo := []struct {
		name string
		b    []byte
		kind api.Kind
		says string
		is   error
	}{
		{"gzip: garbage after it", cat(g, []byte("garbage")), bad, "", ErrTrailing},
		{"gzip: one byte after it", cat(g, g[:1]), bad, "", ErrTrailing},
		{"gzip: garbage after padding", cat(g, make([]byte, 512), []byte{1}), bad, "", ErrTrailing},
		{"gzip: a member after padding", cat(g, make([]byte, 512), g), bad, "", ErrTrailing},
		{"gzip: its second member is cut", cat(g, g[:len(g)-9]), bad, "", ErrTruncated},
		{"gzip: CRC", edit(g, func(b []byte) { b[len(b)-8]++ }), bad, "", ErrChecksum},
		{"gzip: length", edit(g, func(b []byte) { b[len(b)-4]++ }), bad, "", ErrChecksum},
		{"gzip: data", edit(g, func(b []byte) { b[len(b)/2] ^= 8 }), bad, "", nil},
		{"gzip: reserved flags", edit(g, func(b []byte) { b[3] = 0x20 }), unsupported, "flags", nil},
		{"gzip: another method", cat(g, edit(g, func(b []byte) { b[2] = 9 })), unsupported, "method 9", nil},
		{"gzip: CRC of the header", cat(edit(g[:10], func(b []byte) { b[3] = 1 << 1 }), []byte{1, 2}, g[10:]), bad,
			"header", nil},
		{"gzip: a name without end", cat(edit(g[:10], func(b []byte) { b[3] = 1 << 3 }), bytes.Repeat([]byte{'n'}, 1<<20)),
			bad, "header", nil},
		{"gzip: block of kind 3", gz(new(bitWriter).put(1, 1).put(3, 2).b, nil), bad, "damaged", nil},
		{"gzip: stored length", gz([]byte{1, 1, 0, 0, 0, 'x'}, []byte("x")), bad, "damaged", nil},
		{"gzip: too many codes", gz(new(bitWriter).put(1, 1).put(2, 2).put(31, 5).put(31, 5).put(0, 4).b, nil), bad,
			"damaged", nil},
		{"gzip: lengths that no code has", gz(new(bitWriter).put(1, 1).put(2, 2).put(0, 14).put(0o7777, 12).b, nil),
			bad, "damaged", nil},
		// The fixed codes 257 and 0: three bytes from before the start.
		{"gzip: a distance before the start", gz(new(bitWriter).put(1, 1).put(1, 2).put(1<<6, 7).put(0, 5).put(0, 7).b, nil),
			bad, "damaged", nil},
		{"gzip: a distance into the member before", cat(g, gz(new(bitWriter).put(1, 1).put(1, 2).put(1<<6, 7).put(0, 5).
			put(0, 7).b, nil)), bad, "damaged", nil},

		{"xz: garbage after it", cat(x, []byte("garbage!")), bad, "", ErrTrailing},
		{"xz: padding of three", cat(x, make([]byte, 3)), bad, "", ErrTrailing},
		{"xz: garbage after padding", cat(x, make([]byte, 8), []byte("gbg!")), bad, "", ErrTrailing},
		{"xz: its second stream is cut", cat(x, make([]byte, 4), x[:40]), bad, "", ErrTruncated},
		{"xz: header of the stream", edit(x, func(b []byte) { b[8]++ }), bad, "header of the stream", nil},
		{"xz: unknown checksum", xzFile(5, lzma2Small, plainLZMA2, make([]byte, 16), 5), unsupported, "checksums", nil},
		{"xz: header of a block", edit(x, func(b []byte) { b[16]++ }), bad, "header of a block", nil},
		{"xz: CRC64", edit(x, func(b []byte) { b[len(b)-28]++ }), bad, "", ErrChecksum},
		{"xz: CRC32", edit(x32, func(b []byte) { b[len(b)-26]++ }), bad, "", ErrChecksum},
		{"xz: SHA-256", edit(xs, func(b []byte) { b[len(b)-40]++ }), bad, "", ErrChecksum},
		{"xz: data", edit(x, func(b []byte) { b[len(b)/2]++ }), bad, "", nil},
		{"xz: data of the second of several blocks", edit(xm, func(b []byte) { b[len(b)/2]++ }), bad, "", nil},
		{"xz: BCJ", run(t, text, "xz", "-c", "--x86", "--lzma2"), unsupported, "BCJ x86", nil},
		{"xz: delta", run(t, text, "xz", "-c", "--delta=dist=4", "--lzma2"), unsupported, "delta", nil},
		{"xz: unknown filter", xzFile(0, []byte{0, 0x30, 0}, plainLZMA2, nil, 5), unsupported, "filter 0x30", nil},
		{"xz: a filter twice", xzFile(0, []byte{1, 0x21, 1, 0, 0x21, 1, 0}, plainLZMA2, nil, 5), bad, "filters", nil},
		{"xz: reserved flags of a block", xzFile(0, []byte{4, 0x21, 1, 0}, plainLZMA2, nil, 5), unsupported, "flags", nil},
		{"xz: a dictionary of 4 GiB", xzFile(0, []byte{0, 0x21, 1, 40}, plainLZMA2, nil, 5), unsupported,
			"dictionary of 4096 MiB", nil},
		{"xz: a dictionary that cannot be", xzFile(0, []byte{0, 0x21, 1, 41}, plainLZMA2, nil, 5), bad, "filters", nil},
		{"xz: sizes of a block are too small", xzFile(0, []byte{0xc0, 8, 5, 0x21, 1, 0}, plainLZMA2, nil, 5), bad,
			"compressed size", nil},
		{"xz: sizes of a block are too large", xzFile(0, []byte{0xc0, 9, 6, 0x21, 1, 0}, plainLZMA2, nil, 6), bad,
			"damaged", nil},
		{"xz: sizes of a block are huge", xzFile(0, []byte{0xc0, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0x7f,
			0x21, 1, 0}, plainLZMA2, nil, 5), bad, "damaged", nil},
		{"xz: a size that has no end", xzFile(0, append([]byte{0x40}, bytes.Repeat([]byte{0xff}, 20)...), plainLZMA2, nil, 5),
			bad, "cannot be", nil},
		{"xz: plain size alone is wrong", xzFile(0, []byte{0x80, 6, 0x21, 1, 0}, plainLZMA2, nil, 5), bad,
			"damaged", nil},
		{"xz: index of another block", xzEnd(good[:len(good)-20], 0, 20, 5), bad, "record 0", nil},
		{"xz: index without blocks", xzEnd(good[:len(good)-20], 0), bad, "index length is 0", nil},
		{"xz: CRC of the index", edit(good, func(b []byte) { b[len(b)-13]++ }), bad, "checksum for index", nil},
		{"xz: footer", edit(good, func(b []byte) { b[len(b)-12]++ }), bad, "footer checksum", nil},
		{"xz: flags of the footer", xzEnd(good[:len(good)-20], 1, 21, 5), bad, "footer flags", nil},
		{"xz: chunk of no kind", xzFile(0, lzma2Small, []byte{0x01, 0, 0, 1, 3, 0, 0, 0}, nil, 5), bad, "unknown kind", nil},
		{"xz: chunk that needs what was before", xzFile(0, lzma2Small, []byte{0x02, 0, 0, 0, 0}, nil, 1), bad,
			"unexpected chunk", nil},
		{"xz: chunk without properties", xzFile(0, lzma2Small, []byte{0x01, 0, 0, 1, 0x80, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0},
			nil, 2), bad, "unexpected chunk", nil},
		{"xz: properties that cannot be", xzFile(0, lzma2Small, []byte{0xe0, 0, 0, 0, 4, 225, 0, 0, 0, 0, 0, 0}, nil, 1),
			bad, "properties", nil},
		{"xz: chunk without start", xzFile(0, lzma2Small, []byte{0xe0, 0, 0, 0, 4, 0x5d, 1, 0, 0, 0, 0, 0}, nil, 1),
			bad, "first byte", nil},
		{"xz: a copy of nothing", xzFile(0, lzma2Small, []byte{0xe0, 0, 9, 0, 5, 0x5d, 0, 0xff, 0xff, 0xff, 0xf0, 0, 0},
			nil, 9), bad, "damaged", nil},

		{"zstd: garbage after it", cat(z, []byte("garbage")), bad, "", ErrTrailing},
		{"zstd: zeros after it", cat(z, make([]byte, 512)), bad, "", ErrTrailing},
		{"zstd: two bytes after it", cat(z, z[:2]), bad, "", ErrTruncated},
		{"zstd: a skippable frame is cut", cat(z, skippable(1000)[:900]), bad, "", ErrTruncated},
		{"zstd: its second frame is cut", cat(z, z[:len(z)-1]), bad, "", ErrTruncated},
		{"zstd: checksum", edit(z, func(b []byte) { b[len(b)-1]++ }), bad, "", ErrChecksum},
		{"zstd: data", edit(z, func(b []byte) { b[len(b)/2] ^= 8 }), bad, "", nil},
		{"zstd: more content than it says", edit(zf, func(b []byte) { b[5]-- }), bad, "", nil},
		{"zstd: less content than it says", edit(zf, func(b []byte) { b[5]++ }), bad, "frame size", nil},
		{"zstd: reserved flag", edit(z, func(b []byte) { b[4] |= 8 }), bad, "reserved bit", nil},
		{"zstd: dictionary", append(le.AppendUint32(nil, zstdMagic), 1, 0, 77, 1, 0, 0), unsupported, "dictionary", nil},
		{"zstd: a window of 3.75 TiB", zs(0xff, rawLiterals), unsupported, "window of", nil},
		{"zstd: content of 16 EiB", append(le.AppendUint32(nil, zstdMagic), bytes.Repeat([]byte{0xe0}, 20)...),
			unsupported, "window of", nil},
		{"zstd: block of kind 3", append(zs(0), 7, 0, 0), bad, "block type", nil},
		{"zstd: a block larger than its window", append(zs(0), 3|(1025&31)<<3, 1025>>5, 0, 0), unsupported, "block exceeds", nil},
		{"zstd: a block without literals", zs(0, nil), bad, "damaged", nil},
		{"zstd: more literals than there are", zs(0, []byte{5 << 3, 'h', 0}), bad, "damaged", nil},
		{"zstd: literals of a tree that was not sent", zs(0, []byte{3 | 4<<4, 1 << 6, 0, 1, 0}), bad, "damaged", nil},
		{"zstd: a tree that cannot be", zs(0, []byte{2 | 4<<4, 3 << 6, 0, 129, 0xff, 1, 0}), bad, "damaged", nil},
		{"zstd: tables that were not sent", zs(0, []byte{0, 1, 0xfc, 1}), bad, "damaged", nil},
		{"zstd: reserved modes", zs(0, []byte{0, 1, 3, 1}), bad, "damaged", nil},
		{"zstd: codes that cannot be", zs(0, []byte{0, 1, 0x54, 36, 0, 0, 1}), bad, "damaged", nil},
		{"zstd: a table that is too large", zs(0, []byte{0, 1, 0xa8, 0x0f, 0, 0, 1}), bad, "damaged", nil},
		{"zstd: sequences without bits", zs(0, []byte{0, 1, 0x54, 0, 0, 0}), bad, "damaged", nil},
		{"zstd: sequences without end", zs(0, []byte{0, 1, 0x54, 0, 0, 0, 0}), bad, "damaged", nil},
		// A single sequence: no literals, a match of 3 at distance 4 (code 0 is repeat 1, but without literals 2).
		{"zstd: a distance before the start", zs(0, []byte{0, 1, 0x54, 0, 0, 0, 1}), bad, "damaged", nil},
		{"zstd: a distance into the frame before", cat(z, zs(0, []byte{0, 1, 0x54, 0, 0, 0, 1})), bad, "damaged", nil},
	}
	for _, c := range zoo {
		_, err := unpack(c.b, Limits{})
		if !api.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: kind %v: %v", c.name, api.KindOf(err), err)
		}
	}
}

// TestCut: an archive cut anywhere gets an error, and the bytes read before are the start of the content.
func TestCut(t *testing.T) {
	text := samples(t)["text"][:3000]
	for _, tool := range []string{"gzip", "xz -0", "xz -0 -T2 --block-size=1000", "zstd", "zstd -19"} {
		z := run(t, text, append(strings.Fields(tool), "-c")...)
		for n := range z {
			r, err := NewReader(bytes.NewReader(z[:n]), Detect(z), Limits{})
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			_, err = got.ReadFrom(r)
			if !api.Is(err, api.Corrupt) || !errors.Is(err, ErrTruncated) || !bytes.HasPrefix(text, got.Bytes()) {
				t.Fatalf("%s, %d of %d bytes: %v", tool, n, len(z), err)
			}
			r.Close()
		}
	}
}

// TestFlip: with any wrong byte, the reader never accepts wrong content.
func TestFlip(t *testing.T) {
	text := samples(t)["text"][:1500]
	for _, tool := range []string{"gzip", "xz -0", "xz -0 --check=crc32", "xz -0 -T2 --block-size=500 --check=sha256",
		"zstd", "zstd -19"} {
		z := run(t, text, append(strings.Fields(tool), "-c")...)
		for i := range z {
			for _, mask := range []byte{1, 0x80} {
				bad := edit(z, func(b []byte) { b[i] ^= mask })
				if Detect(bad) == None {
					continue
				}
				if got, err := unpack(bad, Limits{}); err == nil && !bytes.Equal(got, text) {
					t.Errorf("%s: byte %d with %#x: wrong content without an error", tool, i, mask)
				} else if err != nil {
					known(t, err)
				}
			}
		}
	}
}

// TestXzGuardRefusesManyLargeDictionaries: the decoder allocates the dictionary named by each block, so the guard
// bounds the dictionaries of blocks without content.
func TestXzGuardRefusesManyLargeDictionaries(t *testing.T) {
	if err := guarded(20_000, 28); !api.Is(err, api.OutOfRange) || !strings.Contains(err.Error(), "dictionary of 64 MiB") {
		t.Errorf("20,000 dictionaries of 64 MiB in 320 KB: %v", err)
	}
	if err := guarded(20_000, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("20,000 dictionaries of 4 KiB: %v", err)
	}
}

// TestXzGuardRefusesBlocksWithoutEnd: the decoder keeps a list of the blocks, so the guard bounds the number of blocks.
func TestXzGuardRefusesBlocksWithoutEnd(t *testing.T) {
	if err := guarded(maxBlocks, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%d blocks: %v", maxBlocks, err)
	}
	if err := guarded(maxBlocks+1, 0); !api.Is(err, api.OutOfRange) || !strings.Contains(err.Error(), "blocks") {
		t.Errorf("%d blocks: %v", maxBlocks+1, err)
	}
}

// guarded passes a stream of empty blocks, without an index, through the guard.
func guarded(blocks int, dict byte) error {
	head := []byte{2, 0, 0x21, 1, dict, 0, 0, 0}
	block := append(le.AppendUint32(head, crc(head)), 0, 0, 0, 0)
	_, err := io.Copy(io.Discard, newXzGuard(bytes.NewReader(append(xzStart(0), bytes.Repeat(block, blocks)...))))
	return err
}

// TestMemory: the memory of an unpacking process follows from the window, and not from the size.
func TestMemory(t *testing.T) {
	suite.Long(t)
	dir := t.TempDir()
	packed := filepath.Join(dir, "packed")
	try := func(in []byte, args ...string) int {
		z := run(t, in, append(args, "-c")...)
		if err := os.WriteFile(packed, z, 0o600); err != nil {
			t.Fatal(err)
		}
		return int(unpackSelf(t, packed, os.DevNull, dir).rss)
	}
	idle := try([]byte("hello"), "gzip")
	rng := rand.New(rand.NewChaCha8([32]byte{2}))
	block := make([]byte, 75<<20)
	for i := 0; i < len(block); i += 8 {
		le.PutUint64(block[i:], rng.Uint64())
	}
	// The second half is copies from 75 MiB before; the first quarter comes once more from 112 MiB before.
	far := cat(block, block[:len(block)/2], block[:len(block)/4])
	zeros := make([]byte, 150<<20)
	for _, c := range []struct {
		tool string
		in   []byte
		most int // MiB
	}{
		{"zstd -1 --long=27", far, 150}, {"zstd -1 --long=26", far, 90}, {"zstd", zeros, 30}, {"gzip -1", zeros, 10},
		{"xz -0 -T1", zeros, 15}, {"xz -0 -T1 --lzma2=preset=0,dict=64MiB", zeros, 80},
		{"xz -0 -T2 --lzma2=preset=0,dict=64MiB --block-size=24MiB", zeros, 200},
	} {
		used := try(c.in, strings.Fields(c.tool)...) - idle
		t.Logf("%s: %d MiB above the %d when idle", c.tool, used, idle)
		if used > c.most {
			t.Errorf("%s: %d MiB above idle", c.tool, used)
		}
		if c.tool == "zstd -1 --long=27" {
			b, err := os.ReadFile(packed)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := unpack(b, Limits{}); err != nil || !bytes.Equal(got, far) {
				t.Errorf("%s: differs: %v", c.tool, err)
			}
		}
	}
}
