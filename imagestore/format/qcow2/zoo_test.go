package qcow2

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/format/oracle"
)

// A small image by hand. Clusters of the file: 0 header, 1 L1, 2 L2 of the first half, 3 L2 of the second, from 4 on
// data. Clusters of the disk: 0 data, 1 hole, 2 zero, 3 and 4 compressed side by side, 5 data; the last cluster of the
// disk is data and cut by the disk's end.
type tiny struct {
	b        []byte
	cluster  int
	extended bool
	want     []byte
}

var be = binary.BigEndian

func makeTiny(t testing.TB, clusterBits int, zstdType, extended bool) *tiny {
	n := 1 << clusterBits
	m := &tiny{b: make([]byte, 7*n), cluster: n, extended: extended}
	per := n / 8
	if extended {
		per /= 2
	}
	size := 2*per*n - 100
	be.PutUint32(m.b, magic)
	be.PutUint32(m.b[4:], 3)
	be.PutUint32(m.b[20:], uint32(clusterBits))
	be.PutUint64(m.b[24:], uint64(size))
	be.PutUint32(m.b[36:], 2)
	be.PutUint64(m.b[40:], uint64(n))
	be.PutUint32(m.b[96:], 4)
	be.PutUint32(m.b[100:], 112)
	be.PutUint64(m.b[n:], uint64(2*n)|1<<63)
	be.PutUint64(m.b[n+8:], uint64(3*n)|1<<63)
	m.want = make([]byte, size)
	for i := range n {
		m.b[4*n+i] = byte(i*7 + i>>8)
		m.b[5*n+i] = byte(i*11 + i>>8)
	}
	copy(m.want, m.b[4*n:5*n])
	copy(m.want[5*n:], m.b[5*n:6*n])
	m.set(0, uint64(4*n)|1<<63, 0xffffffff)
	m.set(2, 1, 0)
	if extended {
		m.set(2, 0, 0xffffffff<<32)
	}
	m.set(5, uint64(5*n)|1<<63, 0xffffffff)
	at := 6 * n
	for c := 3; c < 5; c++ {
		plain := bytes.Repeat([]byte{byte(c), 1, byte(c), 2}, n/4)
		var z []byte
		if zstdType {
			be.PutUint64(m.b[72:], incompatCompressed)
			m.b[104] = compressZstd
			w, err := zstd.NewWriter(nil)
			if err != nil {
				t.Fatal(err)
			}
			z = w.EncodeAll(plain, nil)
		} else {
			z = deflated(t, plain, 6)
		}
		copy(m.want[c*n:], plain)
		copy(m.b[at:], z)
		m.set(c, m.compressed(at, len(z)), 0)
		at += len(z)
	}
	// The last cluster of the disk is the tail of the file, as far as the disk goes.
	m.b = append(m.b, bytes.Repeat([]byte{0xAB}, n-100)...)
	m.set(2*per-1, uint64(7*n)|1<<63, 0xffffffff)
	copy(m.want[size-(n-100):], m.b[7*n:])
	if extended {
		be.PutUint64(m.b[72:], be.Uint64(m.b[72:])|incompatExtendedL2)
	}
	return m
}

func (m *tiny) compressed(off, n int) uint64 {
	bits := uint(0)
	for 1<<bits < m.cluster {
		bits++
	}
	sectors := (off+n-1)/sector - off/sector
	return flagPacked | uint64(sectors)<<(62-(bits-8)) | uint64(off)
}

// entryAt is the place of a cluster's L2 entry in the file.
func (m *tiny) entryAt(cluster int) int {
	if m.extended {
		return 2*m.cluster + cluster*16
	}
	return 2*m.cluster + cluster*8
}

func (m *tiny) set(cluster int, entry, bitmap uint64) {
	be.PutUint64(m.b[m.entryAt(cluster):], entry)
	if m.extended {
		be.PutUint64(m.b[m.entryAt(cluster)+8:], bitmap)
	}
}

// read opens an image and reads all bytes.
func read(b []byte, lim Limits) ([]byte, error) {
	im, err := Open(bytes.NewReader(b), int64(len(b)), lim)
	if err != nil {
		return nil, err
	}
	m, err := oracle.Content(im)
	if err != nil {
		return nil, err
	}
	return m.B, nil
}

func TestTiny(t *testing.T) {
	suite.Slow(t)
	for _, bits := range []int{9, 12, 14, 16} {
		for _, z := range []bool{false, true} {
			for _, extended := range []bool{false, true} {
				if extended && bits < 14 || bits == 16 && !extended {
					continue
				}
				m := makeTiny(t, bits, z, extended)
				lim := Limits{}
				got, err := read(m.b, lim)
				if err != nil {
					t.Fatal(bits, z, extended, err)
				}
				if i := oracle.Differs(got, m.want); i >= 0 {
					t.Fatalf("clusters of 2^%d, zstd %v, extended %v: byte %d differs", bits, z, extended, i)
				}
			}
		}
	}
}

func TestRefused(t *testing.T) {
	u32 := func(off int, v uint32) func(*tiny) { return func(m *tiny) { be.PutUint32(m.b[off:], v) } }
	u64 := func(off int, v uint64) func(*tiny) { return func(m *tiny) { be.PutUint64(m.b[off:], v) } }
	l1 := func(i int, v uint64) func(*tiny) { return u64(4096+8*i, v) }
	l2 := func(c int, v uint64) func(*tiny) { return func(m *tiny) { m.set(c, v, 0) } }
	for _, c := range []struct {
		name string
		edit func(*tiny)
		kind api.Kind
		says string
	}{
		{"no image", u32(0, 0x12345678), api.Invalid, "not a qcow2 image"},
		{"empty", func(m *tiny) { m.b = nil }, api.Invalid, "not a qcow2 image"},
		{"version 1", u32(4, 1), api.Unsupported, "version 1"},
		{"version 4", u32(4, 4), api.Unsupported, "version 4"},
		{"tiny clusters", u32(20, 8), api.Corrupt, "cluster_bits"},
		{"huge clusters", u32(20, 22), api.Corrupt, "cluster_bits"},
		{"cluster_bits of 2^32-1", u32(20, 1<<32-1), api.Corrupt, "cluster_bits"},
		{"AES", u32(32, 1), api.Unsupported, "AES"},
		{"LUKS", u32(32, 2), api.Unsupported, "LUKS"},
		{"unknown encryption", u32(32, 3), api.Unsupported, "unknown method 3"},
		{"backing file", func(m *tiny) {
			be.PutUint64(m.b[8:], 600)
			be.PutUint32(m.b[16:], 8)
			copy(m.b[600:], "base.img")
		}, api.Unsupported, `backing file "base.img"`},
		{"backing file far off", u64(8, 1<<60), api.Unsupported, "backing file:"},
		{"data file", u64(72, incompatDataFile), api.Unsupported, "external data file"},
		{"corrupt", u64(72, incompatCorrupt), api.Corrupt, "marked corrupt"},
		{"unknown features", u64(72, 1<<5|1<<63), api.Unsupported, "bit 5 and the unknown feature of bit 63"},
		{"named feature", func(m *tiny) {
			be.PutUint64(m.b[72:], 1<<40)
			be.PutUint32(m.b[112:], 0x99999999) // an unknown extension, with padding
			be.PutUint32(m.b[116:], 3)
			be.PutUint32(m.b[128:], extFeatures)
			be.PutUint32(m.b[132:], 96)
			copy(m.b[136:], "\x01\x28compatible one")
			copy(m.b[184:], "\x00\x28time travel")
		}, api.Unsupported, `"time travel" (bit 40)`},
		{"extension too long", func(m *tiny) {
			be.PutUint64(m.b[72:], 1<<40)
			be.PutUint32(m.b[112:], extFeatures)
			be.PutUint32(m.b[116:], 1<<32-1)
		}, api.Unsupported, "bit 40"},
		{"short header", u32(100, 96), api.Corrupt, "header_length"},
		{"odd header", u32(100, 108), api.Corrupt, "header_length"},
		{"long header", u32(100, 8192), api.Corrupt, "header_length"},
		{"refcount order", u32(96, 7), api.Corrupt, "refcount_order"},
		{"compression bit alone", u64(72, incompatCompressed), api.Corrupt, "compression type"},
		{"compression type alone", func(m *tiny) { m.b[104] = 1 }, api.Corrupt, "compression type"},
		{"compression type 2", func(m *tiny) {
			be.PutUint64(m.b[72:], incompatCompressed)
			m.b[104] = 2
		}, api.Unsupported, "compression type 2"},
		{"extended with small clusters", u64(72, incompatExtendedL2), api.Corrupt, "16 KiB"},
		{"size of 2^63", u64(24, 1<<63), api.OutOfRange, "virtual size"},
		{"size of 2^64-1", u64(24, 1<<64-1), api.OutOfRange, "virtual size"},
		{"size above the L1 table", u64(24, 1<<40), api.Corrupt, "L1 table has 2 entries"},
		{"L1 too long", u32(36, 1<<23), api.OutOfRange, "L1 table of 8388608"},
		{"L1 in the header", u64(40, 0), api.Corrupt, "L1 table's offset"},
		{"L1 askew", u64(40, 4096+512), api.Corrupt, "L1 table's offset"},
		{"L1 outside", u64(40, 1<<30), api.Corrupt, "the L1 table"},
		{"L1 far outside", u64(40, 1<<62), api.Corrupt, "L1 table's offset"},
		{"L1 reserved bits", l1(0, 1<<60|2*4096), api.Corrupt, "L1 entry 0"},
		{"L2 askew", l1(1, 3*4096+512), api.Corrupt, "L1 entry 1"},
		{"L2 outside", l1(1, 1<<40), api.Corrupt, "L1 entry 1"},
		{"L2 twice", l1(1, 2*4096), api.Corrupt, "same L2 table"},
		{"L2 in L1", l1(1, 4096), api.Corrupt, "lies in the L1 table"},
		{"data askew", l2(0, 4*4096+512), api.Corrupt, "cluster 0"},
		{"data outside", l2(5, 1<<40), api.Corrupt, "cluster 5"},
		{"data in L1", l2(0, 4096), api.Corrupt, "the image's tables"},
		{"data in L2", l2(1, 3*4096), api.Corrupt, "the image's tables"},
		{"data twice", func(m *tiny) {
			for i := range 20 {
				m.set(10+i, 5*4096, 0)
			}
		}, api.Corrupt, "more than once"},
		{"reserved bits", l2(0, 4*4096|1<<56), api.Corrupt, "reserved bits"},
		{"zero in version 2", u32(4, 2), api.Corrupt, "version 2"},
		{"compressed in the header", func(m *tiny) { m.set(3, m.compressed(200, 100), 0) }, api.Corrupt, "outside of"},
		{"compressed in L2", func(m *tiny) { m.set(3, m.compressed(2*4096+10, 100), 0) }, api.Corrupt, "tables"},
		{"compressed outside", func(m *tiny) { m.set(3, m.compressed(1<<30, 100), 0) }, api.Corrupt, "outside of"},
		{"compressed nonsense", func(m *tiny) { m.set(3, m.compressed(5*4096, 4096), 0) }, api.Corrupt, "deflate"},
		{"compressed too short", func(m *tiny) {
			z := deflated(t, make([]byte, 4000), 6)
			clear(m.b[6*4096 : 7*4096])
			copy(m.b[6*4096:], z)
			m.set(3, m.compressed(6*4096, len(z)), 0)
		}, api.Corrupt, "too early"},
		{"bad zstd", func(m *tiny) {
			be.PutUint64(m.b[72:], incompatCompressed)
			m.b[104] = compressZstd
		}, api.Corrupt, "zstd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny(t, 12, false, false)
			c.edit(m)
			_, err := read(m.b, Limits{})
			if api.KindOf(err) != c.kind || err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("error %v of kind %v, want kind %v and %q", err, api.KindOf(err), c.kind, c.says)
			}
		})
	}
	for _, c := range []struct {
		name          string
		entry, bitmap uint64
	}{
		{"both data and zero", 4 * 16384, 1<<32 | 1},
		{"no cluster", 0, 1},
		{"reserved bits", 1, 0},
	} {
		m := makeTiny(t, 14, false, true)
		m.set(1, c.entry, c.bitmap)
		if _, err := read(m.b, Limits{}); !api.Is(err, api.Corrupt) || !strings.Contains(err.Error(), c.name) &&
			!strings.Contains(err.Error(), "allocated, but no cluster") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestLimits(t *testing.T) {
	m := makeTiny(t, 12, false, false)
	if _, err := read(m.b, Limits{VirtualSize: 1 << 20}); !api.Is(err, api.OutOfRange) {
		t.Fatalf("above the limit of the virtual size: %v", err)
	}
	if _, err := ReadHeader(m.b[:HeadSize/2], Limits{VirtualSize: 1 << 20}); !api.Is(err, api.OutOfRange) {
		t.Fatalf("above the limit of the virtual size, from the header: %v", err)
	}
	if i, err := ReadHeader(m.b[:4096], Limits{}); err != nil || i.VirtualSize != int64(len(m.want)) {
		t.Fatalf("header alone: %+v, %v", i, err)
	}
	// A bomb: every cluster of a large disk is the same few compressed bytes.
	path := filepath.Join(t.TempDir(), "bomb.qcow2")
	oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", path, "200G")
	qemuIO(t, path, "write -c -P 1 0 2M")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	table := int(be.Uint64(b[be.Uint64(b[40:]):]) & offsetMask)
	for i := 1; i < 100000; i++ {
		copy(b[table+8*i:], b[table:table+8])
	}
	if _, err := read(b, Limits{}); !api.Is(err, api.OutOfRange) || !strings.Contains(err.Error(), "2000 times") {
		t.Fatalf("a bomb: %v", err)
	}
}

// TestTruncated: a truncated file is refused, and never reads as other content.
func TestTruncated(t *testing.T) {
	images := map[string]*tiny{
		"zlib": makeTiny(t, 9, false, false), "zstd": makeTiny(t, 9, true, false), "extended": makeTiny(t, 14, false, true),
	}
	for name, m := range images {
		step := max(1, len(m.b)/4000)
		for n := 0; n < len(m.b); n += step {
			_, err := read(m.b[:n], Limits{})
			want := api.Corrupt
			if n < 8 {
				want = api.Invalid
			}
			if !api.Is(err, want) {
				t.Fatalf("%s cut to %d of %d bytes: %v", name, n, len(m.b), err)
			}
		}
		// The file shrinks after Open.
		im, err := Open(bytes.NewReader(m.b), int64(len(m.b)), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		im.r = bytes.NewReader(m.b[:len(m.b)-10])
		if _, err := oracle.Content(im); !api.Is(err, api.Corrupt) {
			t.Fatalf("%s: a file that shrank: %v", name, err)
		}
	}
}

type failing struct{ io.ReaderAt }

func (failing) ReadAt([]byte, int64) (int, error) {
	return 0, api.Errorf(api.Unavailable, "the disk is gone")
}

func TestReaderFails(t *testing.T) {
	if _, err := Open(failing{}, 1<<20, Limits{}); !api.Is(err, api.Unavailable) {
		t.Fatalf("error of the reader at open: %v", err)
	}
	m := makeTiny(t, 12, false, false)
	im, err := Open(bytes.NewReader(m.b), int64(len(m.b)), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	im.r = failing{}
	if _, err := im.ReadAt(make([]byte, 10), 0); !api.Is(err, api.Unavailable) {
		t.Fatalf("error of the reader: %v", err)
	}
}

// TestRefusedQemu: unsupported images made by qemu-img are refused.
func TestRefusedQemu(t *testing.T) {
	dir := t.TempDir()
	base := filepath.Join(dir, "base.qcow2")
	oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", base, "1M")
	secret := []string{"--object", "secret,id=s,data=x"}
	for _, c := range []struct {
		says string
		args []string
	}{
		{"version 1", []string{"-f", "qcow"}},
		{"base.qcow2", []string{"-f", "qcow2", "-b", base, "-F", "qcow2"}},
		{"external data file", []string{"-f", "qcow2", "-o", "data_file=" + filepath.Join(dir, "data")}},
		{"(AES)", append(secret, "-f", "qcow2", "-o", "encrypt.format=aes,encrypt.key-secret=s")},
	} {
		path := filepath.Join(dir, "i")
		oracle.Qemu(t, "qemu-img", append(append([]string{"create", "-q"}, c.args...), path, "1M")...)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !Detect(b[:8]) {
			t.Errorf("%s: not detected", c.says)
		}
		if _, err := read(b, Limits{}); !api.Is(err, api.Unsupported) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %v", c.says, err)
		}
		if _, err := ReadHeader(b[:min(len(b), HeadSize)], Limits{}); !api.Is(err, api.Unsupported) {
			t.Errorf("%s: error of the header %v", c.says, err)
		}
	}
}

// TestMutants damages images at random. An image which still reads must read as with qemu-img.
func TestMutants(t *testing.T) {
	dir := t.TempDir()
	pattern := patternFile(t)
	n := 25
	if testing.Short() {
		n = 5
	}
	for i, options := range []string{"compat=0.10,cluster_size=512", "cluster_size=512",
		"cluster_size=1k,compression_type=zstd", "cluster_size=16k,extended_l2=on"} {
		rng := rand.New(rand.NewPCG(uint64(i), 9))
		path := filepath.Join(dir, fmt.Sprint(i))
		oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", options, path, "300k")
		qemuIO(t, path, scribble(rng, 300<<10, 16<<10, pattern, 12)...)
		clean, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		l1 := int(be.Uint64(clean[40:]))
		both := 0
		for range n {
			b := bytes.Clone(clean)
			for range 1 + rng.IntN(3) {
				// Most of the damage hits the header, the L1 table or an L2 table.
				at := [...]int{rng.IntN(112), l1 + rng.IntN(64), rng.IntN(len(b)),
					int(be.Uint64(clean[l1:])&offsetMask) + rng.IntN(512)}[rng.IntN(4)]
				b[at] ^= 1 << rng.IntN(8)
			}
			got, err := read(b, Limits{VirtualSize: 8 << 20})
			if err != nil {
				if k := api.KindOf(err); k != api.Corrupt && k != api.Unsupported && k != api.OutOfRange && k != api.Invalid {
					t.Fatalf("error %v of kind %v", err, k)
				}
				continue
			}
			mutant, raw := filepath.Join(dir, "m.qcow2"), filepath.Join(dir, "m.raw")
			if err := os.WriteFile(mutant, b, 0o600); err != nil {
				t.Fatal(err)
			}
			// qemu-img may refuse damage irrelevant for reading: reference counts, snapshots.
			if exec.Command("qemu-img", "convert", "-f", "qcow2", "-O", "raw", mutant, raw).Run() != nil {
				continue
			}
			want, err := os.ReadFile(raw)
			if err != nil {
				t.Fatal(err)
			}
			both++
			// qemu-img counts in sectors.
			if i := oracle.Differs(got, want); i >= 0 && i < len(got)&^(sector-1) {
				keep := filepath.Join(os.TempDir(), "drover-mutant.qcow2")
				if err := os.WriteFile(keep, b, 0o600); err != nil {
					t.Fatal(err)
				}
				t.Fatalf("%s: byte %d differs from what qemu-img reads; kept in %s", options, i, keep)
			}
		}
		t.Logf("%s: %d of %d mutants read by both", options, both, n)
	}
}

func deflated(t testing.TB, b []byte, level int) []byte {
	var z bytes.Buffer
	w, err := flate.NewWriter(&z, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}
