package vmdk

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zlib"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/format/oracle"
)

// A small image by hand, grains of 4 KiB. Sectors of the file: 0 header, 1 and 2 descriptor, 3 directory, 4 and 8 the
// directory's tables, 12 the redundant directory, 13 and 17 the redundant tables, from 24 on grains. Grains of the
// disk: 0 and 3 data side by side in the file, 1 hole, 2 zero, 4 data; the last grain, in the second table, is data and
// cut by the disk's end.
const (
	tinyGrain = 4096
	tinySize  = 514*tinyGrain + 1024
	tinyGD    = 3
	tinyGT    = 4
	tinyRGD   = 12
	tinyData  = 24
)

type tiny struct{ b, want []byte }

const tinyText = `# Disk DescriptorFile
version=1
CID=12345678
parentCID=ffffffff
createType="%s"
RW 4114 SPARSE "tiny.vmdk"
ddb.adapterType = "ide"
`

func makeTiny(compressed bool) *tiny {
	m := &tiny{b: make([]byte, tinyData*sector), want: make([]byte, tinySize)}
	copy(m.b, magicSparse)
	createType, flags := "monolithicSparse", uint32(flagNewlines|flagRedundant|flagZeroGrains)
	if compressed {
		createType, flags = "streamOptimized", flags|flagCompressed|flagMarkers
		le.PutUint16(m.b[77:], 1)
	}
	le.PutUint32(m.b[4:], 1)
	le.PutUint32(m.b[8:], flags)
	for i, v := range []uint64{tinySize / sector, tinyGrain / sector, 1, 2} {
		le.PutUint64(m.b[12+8*i:], v)
	}
	le.PutUint32(m.b[44:], perTable)
	le.PutUint64(m.b[48:], tinyRGD)
	le.PutUint64(m.b[56:], tinyGD)
	le.PutUint64(m.b[64:], tinyData)
	copy(m.b[73:], "\n \r\n")
	m.text(fmt.Sprintf(tinyText, createType))
	for i := range 2 {
		m.entry(tinyGD, i, uint32(tinyGT+4*i))
		m.entry(tinyRGD, i, uint32(tinyRGD+1+4*i))
	}
	m.grain(2, zeroGrain)
	for i, g := range []int{0, 3, 4, 514} {
		plain := bytes.Repeat(fmt.Appendf(nil, "grain %3d sheep ", g), tinyGrain/16)
		copy(m.want[g*tinyGrain:], plain)
		if g == 4 {
			m.b = append(m.b, make([]byte, sector)...)
		}
		m.grain(g, uint32(len(m.b)/sector))
		if compressed {
			plain = packed(g, plain[:min(tinyGrain, tinySize-g*tinyGrain)], i%2*9)
		}
		m.b = append(m.b, plain...)
	}
	return m
}

// packed is a compressed grain with a marker, padded to sectors.
func packed(grain int, plain []byte, level int) []byte {
	var z bytes.Buffer
	w, err := zlib.NewWriterLevel(&z, level)
	if err != nil {
		panic(err)
	}
	if _, err := w.Write(plain); err != nil {
		panic(err)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	b := make([]byte, markSize)
	le.PutUint64(b, uint64(grain*tinyGrain/sector))
	le.PutUint32(b[8:], uint32(z.Len()))
	b = append(b, z.Bytes()...)
	return append(b, make([]byte, -len(b)&(sector-1))...)
}

func (m *tiny) text(s string) {
	clear(m.b[sector : 3*sector])
	copy(m.b[sector:3*sector], s)
}

// entry sets entry i of a table at a sector.
func (m *tiny) entry(at, i int, v uint32) { le.PutUint32(m.b[at*sector+4*i:], v) }

// grain sets the entry of a grain in both tables.
func (m *tiny) grain(g int, v uint32) {
	m.entry(tinyGT, g, v)
	m.entry(tinyRGD+1, g, v)
}

func (m *tiny) at(g int) int { return int(le.Uint32(m.b[tinyGT*sector+4*g:])) * sector }

func TestTiny(t *testing.T) {
	for _, compressed := range []bool{false, true} {
		m := makeTiny(compressed)
		alone := bytes.Clone(m.b)
		alone[8] &^= flagRedundant
		for i, b := range [][]byte{m.b, withFooter(bytes.Clone(m.b)), alone} {
			open := opener
			if i == 2 {
				open = streamed
			}
			src, err := open(bytes.NewReader(b), int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			oracle.Same(t, src, m.want)
			for _, want := range []block.Extent{{Off: 0, Len: 4096, Kind: block.Data}, {Off: 4096, Len: 4096, Kind: block.Hole},
				{Off: 8192, Len: 4096, Kind: block.Zero}, {Off: 12288 + 100, Len: 8192 - 100, Kind: block.Data},
				{Off: 20480, Len: tinySize - 1024 - 20480, Kind: block.Hole}, {Off: tinySize - 512, Len: 512, Kind: block.Data}} {
				if e, err := src.Next(want.Off); err != nil || e != want {
					t.Errorf("extent %+v, %v, want %+v", e, err, want)
				}
			}
			if err := src.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestRedundant: the redundant directory and tables replace a damaged directory or table.
func TestRedundant(t *testing.T) {
	for name, edit := range map[string]func(m *tiny){
		"directory outside":  func(m *tiny) { le.PutUint64(m.b[56:], 1<<40) },
		"directory nonsense": func(m *tiny) { m.entry(tinyGD, 0, 1<<31) },
		"table nonsense":     func(m *tiny) { m.entry(tinyGT, 7, 1<<31) },
		"tables overlap":     func(m *tiny) { m.entry(tinyGD, 1, tinyGT+1) },
	} {
		m := makeTiny(false)
		edit(m)
		im, err := Open(bytes.NewReader(m.b), int64(len(m.b)), Limits{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		oracle.Same(t, im, m.want)
		if info := im.Info(); !info.Redundant || info.Data != 3*tinyGrain+1024 {
			t.Fatalf("%s: %+v", name, info)
		}
	}
}

func TestZoo(t *testing.T) {
	for _, c := range []struct {
		name       string
		compressed bool
		edit       func(m *tiny)
		kind       api.Kind
		says       string
	}{
		{"nothing", false, func(m *tiny) { m.b = nil }, api.Invalid, "does not start with KDMV"},
		{"not VMDK", false, func(m *tiny) { m.b[0] = 'X' }, api.Invalid, "does not start with KDMV"},
		{"ESX sparse", false, func(m *tiny) { copy(m.b, "COWD") }, api.Unsupported, "ESX server"},
		{"ESX seSparse", false, func(m *tiny) { copy(m.b, magicSESparse) }, api.Unsupported, "ESX server"},
		{"header cut", false, func(m *tiny) { m.b = m.b[:300] }, api.Corrupt, "inside the header, at byte 300"},
		{"version 4", false, func(m *tiny) { le.PutUint32(m.b[4:], 4) }, api.Unsupported, "version 4"},
		{"text transfer", false, func(m *tiny) { m.b[75] = '\n' }, api.Corrupt, "line ends"},
		{"lzma", true, func(m *tiny) { le.PutUint16(m.b[77:], 2) }, api.Unsupported, "compression method 2"},
		{"no markers", true, func(m *tiny) { m.b[10] &^= 2 }, api.Unsupported, "without markers"},
		{"no capacity", false, func(m *tiny) { le.PutUint64(m.b[12:], 0) }, api.Corrupt, "capacity is 0"},
		{"huge capacity", false, func(m *tiny) { le.PutUint64(m.b[12:], 1<<63) }, api.OutOfRange, "capacity"},
		{"capacity that overflows", false, func(m *tiny) { le.PutUint64(m.b[12:], 1<<54-1) }, api.OutOfRange, "virtual size"},
		{"capacity above the tables", false, func(m *tiny) { le.PutUint64(m.b[12:], 1<<30) }, api.Corrupt, "grain"},
		{"huge directory", false, func(m *tiny) {
			le.PutUint64(m.b[12:], 64<<40/sector)
			le.PutUint64(m.b[20:], 1)
		}, api.OutOfRange, "grain directory of"},
		{"grain of 3 sectors", false, func(m *tiny) { le.PutUint64(m.b[20:], 3) }, api.Corrupt, "power of two"},
		{"grain of 0", false, func(m *tiny) { le.PutUint64(m.b[20:], 0) }, api.Corrupt, "power of two"},
		{"huge grain", false, func(m *tiny) { le.PutUint64(m.b[20:], 1<<40) }, api.OutOfRange, "grain size"},
		{"short tables", false, func(m *tiny) { le.PutUint32(m.b[44:], 64) }, api.Corrupt, "64 entries"},
		{"endless tables", false, func(m *tiny) { le.PutUint32(m.b[44:], 1<<32-1) }, api.Corrupt, "entries"},
		{"descriptor outside", false, func(m *tiny) { le.PutUint64(m.b[28:], 1<<40) }, api.Corrupt, "the descriptor"},
		{"descriptor far outside", false, func(m *tiny) { le.PutUint64(m.b[28:], 1<<63) }, api.Corrupt, "descriptor offset"},
		{"huge descriptor", false, func(m *tiny) { le.PutUint64(m.b[36:], 1<<30) }, api.Corrupt, "descriptor's size"},
		{"no descriptor", false, func(m *tiny) { le.PutUint64(m.b[28:], 0) }, api.Unsupported, "no descriptor"},
		{"empty descriptor", false, func(m *tiny) { m.text("") }, api.Unsupported, "no descriptor"},
		{"nonsense descriptor", false, func(m *tiny) { m.text("hello") }, api.Corrupt, "no createType"},
		{"no extent", false, func(m *tiny) { m.text(`createType="monolithicSparse"`) }, api.Corrupt, "no extent"},
		{"split disk", false, func(m *tiny) {
			m.text(fmt.Sprintf(tinyText, "twoGbMaxExtentSparse"))
		}, api.Unsupported, `createType "twoGbMaxExtentSparse") in several files`},
		{"two extents", false, func(m *tiny) {
			m.text(fmt.Sprintf(tinyText, "monolithicSparse") + "RW 1 SPARSE \"other.vmdk\"\n")
		}, api.Unsupported, `names 2 files ("tiny.vmdk", "other.vmdk")`},
		{"another file", false, func(m *tiny) {
			m.text("createType=monolithicSparse\nRW 4114 FLAT \"/etc/passwd\" 0\n")
		}, api.Unsupported, `names another file, a "FLAT" extent "/etc/passwd"`},
		{"another folder", false, func(m *tiny) {
			m.text("createType=monolithicSparse\nRW 4114 SPARSE \"../../etc/passwd\"\n")
		}, api.Unsupported, `another file, a "SPARSE" extent "../../etc/passwd"`},
		{"no access", false, func(m *tiny) {
			m.text("createType=monolithicSparse\nNOACCESS 4114 SPARSE \"tiny.vmdk\"\n")
		}, api.Unsupported, "allows no access"},
		{"parent", false, func(m *tiny) {
			m.text(fmt.Sprintf(tinyText, "monolithicSparse") + "parentFileNameHint=\"/etc/shadow\"")
		}, api.Unsupported, `delta of the parent "/etc/shadow"`},
		{"parent by id", false, func(m *tiny) {
			m.text(strings.Replace(fmt.Sprintf(tinyText, "monolithicSparse"), "ffffffff", "0badcafe", 1))
		}, api.Unsupported, `content id "0badcafe"`},
		{"directory in the header", false, func(m *tiny) { le.PutUint64(m.b[56:], 0) }, api.Corrupt, "in the header"},
		{"directory outside", false, func(m *tiny) { le.PutUint64(m.b[56:], 1<<30) }, api.Corrupt, "the grain directory"},
		{"directory far outside", false, func(m *tiny) { le.PutUint64(m.b[56:], 1<<62) }, api.Corrupt, "directory's offset"},
		{"table outside", false, func(m *tiny) { m.entry(tinyGD, 1, 1<<30) }, api.Corrupt, "grain table 1"},
		{"table twice", false, func(m *tiny) { m.entry(tinyGD, 1, tinyGT) }, api.Corrupt, "overlap"},
		{"tables overlap", false, func(m *tiny) { m.entry(tinyGD, 1, tinyGT+3) }, api.Corrupt, "overlap"},
		{"table is the directory", false, func(m *tiny) { m.entry(tinyGD, 0, tinyGD) }, api.Corrupt, "lies in the image's"},
		{"table in the descriptor", false, func(m *tiny) { m.entry(tinyGD, 0, 2) }, api.Corrupt, "lies in the image's"},
		{"grain outside", false, func(m *tiny) { m.grain(9, 1<<30) }, api.Corrupt, "grain 9"},
		{"grain in the header", false, func(m *tiny) {
			m.b[8] &^= flagZeroGrains
		}, api.Corrupt, "grain 2 (at 8192): its data at 0x200 lies in"},
		{"grain in the directory", false, func(m *tiny) { m.grain(9, tinyGD) }, api.Corrupt, "lies in the image's metadata"},
		{"grain in a table", false, func(m *tiny) { m.grain(9, tinyGT+3) }, api.Corrupt, "lies in the image's metadata"},
		{"compressed grain in a table", true, func(m *tiny) { m.grain(9, tinyGT) }, api.Corrupt, "lies in the image's"},
		{"grains twice", false, func(m *tiny) {
			for g := 10; g < 500; g++ {
				m.grain(g, tinyData)
			}
		}, api.Corrupt, "more than once"},
		{"compressed grains twice", true, func(m *tiny) { m.grain(9, tinyData) }, api.Corrupt, "that of sector 0, not 72"},
		{"compressed bomb of one grain", true, func(m *tiny) {
			for g := 10; g < 500; g++ {
				m.grain(g, tinyData)
			}
		}, api.Corrupt, "more than once"},
		{"marker of no size", true, func(m *tiny) { le.PutUint32(m.b[m.at(3)+8:], 0) }, api.Corrupt, "0 compressed bytes"},
		{"marker of 4 GiB", true, func(m *tiny) { le.PutUint32(m.b[m.at(3)+8:], 1<<32-1) }, api.Corrupt, "compressed bytes"},
		{"marker beyond the file", true, func(m *tiny) {
			le.PutUint32(m.b[m.at(514)+8:], 5000)
		}, api.Corrupt, "a compressed grain at"},
		{"not zlib", true, func(m *tiny) { m.b[m.at(3)+12] = 0xff }, api.Corrupt, "compressed data at"},
		{"damaged data", true, func(m *tiny) { m.b[m.at(0)+200] ^= 1 }, api.Corrupt, "compressed data at"},
		{"grain too short", true, func(m *tiny) {
			copy(m.b[m.at(3):], packed(3, make([]byte, 4000), 9))
		}, api.Corrupt, "too early"},
		{"grain too long", true, func(m *tiny) {
			copy(m.b[m.at(3):], packed(3, make([]byte, 4097), 9))
		}, api.Corrupt, "more than a grain"},
		{"last grain too long", true, func(m *tiny) {
			m.b = append(m.b[:m.at(514)], packed(514, make([]byte, 1<<20), 9)...)
		}, api.Corrupt, "more than a grain"},
		{"no footer", true, func(m *tiny) { le.PutUint64(m.b[56:], 1<<64-1) }, api.Corrupt, "the footer: not in"},
		{"footer cut", true, func(m *tiny) {
			m.b = withFooter(m.b)
			m.b = m.b[:len(m.b)-512]
		}, api.Corrupt, "the footer"},
		{"footer without directory", true, func(m *tiny) {
			m.b = withFooter(m.b)
			le.PutUint64(m.b[len(m.b)-1024+56:], 1<<64-1)
		}, api.Corrupt, "has no place of the grain directory"},
		{"footer of version 9", true, func(m *tiny) {
			m.b = withFooter(m.b)
			m.b[len(m.b)-1024+4] = 9
		}, api.Unsupported, "the footer: header version 9"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny(c.compressed)
			m.b[8] &^= flagRedundant // else the redundant tables are read
			c.edit(m)
			for _, open := range []oracle.Opener{opener, streamed} {
				oracle.Refused(t, open, m.b, c.kind, c.says)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	m := makeTiny(false)
	oracle.Refused(t, limited(Limits{VirtualSize: 1 << 20}), m.b, api.OutOfRange, "virtual size")
	// A bomb which unpacks to the announced size, grain by grain: 64 KiB of zeros in a sector each.
	path := filepath.Join(t.TempDir(), "bomb.vmdk")
	oracle.Qemu(t, "sh", "-c", fmt.Sprintf("truncate -s 128M %s.raw && qemu-img convert -f raw -O vmdk -S 0 "+
		"-o subformat=streamOptimized %s.raw %s", path, path, path))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	oracle.Refused(t, limited(Limits{Ratio: 20}), b, api.OutOfRange, "20 times its size")
	oracle.Refused(t, limited(Limits{Ratio: 20, Stream: true}), b, api.OutOfRange, "20 times its size")
	if _, err := oracle.Read(opener, b); err != nil {
		t.Fatal(err)
	}
}

// TestMemory: the largest allowed directory needs little memory.
func TestMemory(t *testing.T) {
	m := makeTiny(false)
	le.PutUint64(m.b[20:], 64<<10/sector)
	le.PutUint64(m.b[12:], maxTables*perTable*(64<<10)/sector)
	le.PutUint64(m.b[56:], 1<<20)
	lim := limited(Limits{VirtualSize: 1 << 60})
	err := oracle.Frugal(t, lim, oracle.Func(func(p []byte, off int64) {
		copy(p, m.b[min(off, int64(len(m.b))):])
		if at := off - 1<<20*sector; at >= 0 && at < maxTables*4 {
			for i := range len(p) / 4 {
				// The last table repeats the first, so that the reader need not walk the tables.
				le.PutUint32(p[i*4:], 1<<22+(uint32(at)/4+uint32(i))%(maxTables-1)*4)
			}
		}
	}), 1<<40)
	if !api.Is(err, api.Corrupt) || !strings.Contains(err.Error(), "grain tables 0 and 4194303 overlap") {
		t.Fatal(err)
	}
}

// TestTruncated: a truncated file is refused, or reads in full without the last padding. A truncated file never reads
// as other content.
func TestTruncated(t *testing.T) {
	for _, compressed := range []bool{false, true} {
		m := makeTiny(compressed)
		footed := withFooter(bytes.Clone(m.b))
		for _, b := range [][]byte{m.b, footed} {
			for n := 0; n < len(b); n += 1 + n%3*37 {
				got, err := oracle.Read(opener, b[:n])
				switch {
				case n < 4 && api.Is(err, api.Invalid):
				case n >= 4 && api.Is(err, api.Corrupt):
				case err == nil && bytes.Equal(got, m.want) && n > m.at(514)+1:
					// Only the padding of the last grain is cut off.
				default:
					t.Fatalf("compressed %v, cut to %d of %d bytes: %v", compressed, n, len(b), err)
				}
			}
		}
		oracle.ReaderFails(t, opener, m.b)
	}
}
