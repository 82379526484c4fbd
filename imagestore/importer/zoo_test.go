package importer_test

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
	"drover.io/drover/replicas/stack"
)

// animal is a hostile image.
type animal struct {
	name string
	b    []byte
	kind api.Kind
	text string
	// stream is another message of a failing stream, of kind Corrupt.
	stream string
}

// edit returns a changed copy of b.
func edit(b []byte, change func(b []byte)) []byte {
	b = bytes.Clone(b)
	change(b)
	return b
}

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// cage makes images of the same content in all formats.
type cage struct {
	t   *testing.T
	raw string
}

func (c cage) image(format, options string) []byte {
	out := filepath.Join(c.t.TempDir(), "image")
	args := []string{"convert", "-f", "raw", "-O", format}
	if options != "" {
		args = append(args, strings.Fields(options)...)
	}
	command(c.t, "qemu-img", append(args, c.raw, out)...)
	return read(c.t, out)
}

func (c cage) packed(tool string, b []byte) []byte {
	dir := c.t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "in"), b, 0o600); err != nil {
		c.t.Fatal(err)
	}
	command(c.t, "sh", "-c", fmt.Sprintf("%s -c < %s/in > %s/out", tool, dir, dir))
	return read(c.t, filepath.Join(dir, "out"))
}

var (
	be = binary.BigEndian
	le = binary.LittleEndian
)

// hostile returns lying images of all formats.
func hostile(t *testing.T) []animal {
	content := sample(8 << 20)
	for i := 4 << 20; i < 5<<20; i++ {
		content[i] = "drover "[i%7] // packs well
	}
	c := cage{t, sparseFile(t, content)}
	var zoo []animal
	add := func(name string, kind api.Kind, text string, b []byte) {
		zoo = append(zoo, animal{name, b, kind, text, ""})
	}

	q, qz := c.image("qcow2", ""), c.image("qcow2", "-c")
	l1 := be.Uint64(q[40:])
	l2 := be.Uint64(q[l1:]) &^ (1 << 63)
	put := func(at, v uint64) func([]byte) { return func(b []byte) { be.PutUint64(b[at:], v) } }
	put32 := func(at uint64, v uint32) func([]byte) { return func(b []byte) { be.PutUint32(b[at:], v) } }
	first := be.Uint64(q[l2:])
	for _, a := range []struct {
		name   string
		kind   api.Kind
		text   string
		change func([]byte)
	}{
		{"version 4", api.Unsupported, "version 4", put32(4, 4)},
		{"negative size", api.OutOfRange, "above the limit", put(24, 1<<63)},
		{"size that overflows", api.OutOfRange, "above the limit", put(24, 1<<64-1)},
		{"L1 too short", api.Corrupt, "the L1 table has 1 entries", put(24, 1<<40)},
		{"L1 behind the file", api.Corrupt, "cut off", put(40, 1<<40)},
		{"L1 off its cluster", api.Corrupt, "L1 table's offset", put(40, l1+8)},
		{"L1 huge", api.OutOfRange, "the L1 table of 4294967295 entries", put32(36, 1<<32-1)},
		{"L2 behind the file", api.Corrupt, "cut off", put(l1, 1<<63|1<<40)},
		{"L2 is the L1", api.Corrupt, "lies in the L1 table", put(l1, 1<<63|l1)},
		{"L2 reserved bits", api.Corrupt, "L1 entry 0", put(l1, l2|1)},
		{"data behind the file", api.Corrupt, "cut off", put(l2, 1<<63|1<<40)},
		{"data in its own table", api.Corrupt, "lies in the image's tables", put(l2, 1<<63|l2)},
		{"data off its cluster", api.Corrupt, "is not that of a cluster", put(l2, first+512)},
		{"data reserved bits", api.Corrupt, "reserved bits", put(l2, first|2)},
		{"one cluster everywhere", api.Corrupt, "more than once", func(b []byte) {
			for i := range uint64(128) {
				be.PutUint64(b[l2+i*8:], first)
			}
		}},
		{"clusters of a terabyte", api.Corrupt, "cluster_bits is 40", put32(20, 40)},
		{"clusters of nothing", api.Corrupt, "cluster_bits is 0", put32(20, 0)},
		{"refcounts", api.Corrupt, "refcount_order", put32(96, 7)},
		{"backing file", api.Unsupported, `backing file "/etc/passwd"`, func(b []byte) {
			be.PutUint64(b[8:], 512)
			be.PutUint32(b[16:], 11)
			copy(b[512:], "/etc/passwd")
		}},
		{"AES", api.Unsupported, "encrypted (AES)", put32(32, 1)},
		{"LUKS", api.Unsupported, "encrypted (LUKS)", put32(32, 2)},
		{"data file", api.Unsupported, "external data file", put(72, 1<<2)},
		{"marked corrupt", api.Corrupt, "marked corrupt", put(72, 1<<1)},
		{"unknown feature", api.Unsupported, "unknown feature", put(72, 1<<30)},
		{"header length", api.Corrupt, "header_length", put32(100, 1<<31)},
	} {
		add("qcow2 "+a.name, a.kind, a.text, edit(q, a.change))
	}
	for _, n := range []uint64{8, 70, 103, l1 + 4, l2 + 100, uint64(len(q)) * 2 / 3} {
		add(fmt.Sprintf("qcow2 cut at %d", n), api.Corrupt, "cut off", q[:n])
	}
	add("qcow2 damaged packed data", api.Corrupt, "compressed data", edit(qz, func(b []byte) {
		table := be.Uint64(b[be.Uint64(b[40:]):]) &^ (1 << 63)
		for i := range uint64(128) {
			if e := be.Uint64(b[table+i*8:]); e>>62 == 1 {
				copy(b[e&(1<<54-1):], bytes.Repeat([]byte{0xff}, 64))
			}
		}
	}))
	// 40 tables of 8192 clusters, all of the same compressed cluster.
	bomb := make([]byte, 64<<10*43)
	copy(bomb, q[:112])
	be.PutUint64(bomb[24:], 40<<29)
	be.PutUint32(bomb[36:], 40)
	be.PutUint64(bomb[40:], 1<<16)
	for i := range uint64(40) {
		be.PutUint64(bomb[1<<16+i*8:], 1<<63|(i+2)<<16)
		for j := range uint64(8192) {
			be.PutUint64(bomb[(i+2)<<16+j*8:], 1<<62|42<<16)
		}
	}
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, 9)
	if err == nil {
		_, err = w.Write(make([]byte, 64<<10))
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	copy(bomb[42<<16:], packed.Bytes())
	add("qcow2 bomb", api.OutOfRange, "times its size", bomb)
	zoo[len(zoo)-1].stream = "used more than once"

	v, vo := c.image("vmdk", ""), c.image("vmdk", "-o subformat=streamOptimized")
	word := func(at int, x uint64) func([]byte) { return func(b []byte) { le.PutUint64(b[at:], x) } }
	gd := int(le.Uint64(v[56:])) * 512
	gt := int(le.Uint32(v[gd:])) * 512
	text := func(b []byte, from, to string) []byte {
		if len(from) != len(to) || !bytes.Contains(b[:20<<10], []byte(from)) {
			t.Fatalf("%q is not in the descriptor, or not as long as %q", from, to)
		}
		return bytes.Replace(b, []byte(from), []byte(to), 1)
	}
	both := func(b []byte) { // redundant tables are as bad
		le.PutUint32(b[gd:], 1<<31)
		le.PutUint32(b[le.Uint64(b[48:])*512:], 1<<31)
	}
	add("vmdk other files", api.Unsupported, "in other files", []byte("# Disk DescriptorFile\nversion=1\nCID=fffffffe\n"+
		"parentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 20480 FLAT \"/etc/passwd\" 0\n"))
	add("vmdk ESX", api.Unsupported, "ESX", cat([]byte("COWD"), make([]byte, 4096)))
	add("vmdk parent", api.Unsupported, "", text(v, "parentCID=ffffffff", "parentCID=12345678"))
	add("vmdk version", api.Unsupported, "version 9", edit(v, func(b []byte) { b[4] = 9 }))
	add("vmdk sent as text", api.Corrupt, "line ends", edit(v, func(b []byte) { b[75] = '\n' }))
	add("vmdk capacity", api.OutOfRange, "", edit(v, word(12, 1<<50)))
	add("vmdk negative capacity", api.OutOfRange, "", edit(v, word(12, 1<<63)))
	add("vmdk grains of 3 sectors", api.Corrupt, "grain size", edit(v, word(20, 3)))
	add("vmdk huge grains", api.OutOfRange, "", edit(v, word(20, 1<<20)))
	add("vmdk directory", api.Corrupt, "cut off", edit(v, func(b []byte) {
		le.PutUint64(b[48:], 1<<40)
		le.PutUint64(b[56:], 1<<40)
	}))
	add("vmdk tables", api.Corrupt, "", edit(v, both))
	add("vmdk grain behind the file", api.Corrupt, "", edit(v, func(b []byte) {
		le.PutUint32(b[gt:], 1<<31)
		le.PutUint64(b[48:], 0)
		le.PutUint32(b[8:], le.Uint32(b[8:])&^2)
	}))
	add("vmdk cut", api.Corrupt, "cut off", v[:len(v)/2])
	add("vmdk stream cut", api.Corrupt, "", vo[:len(vo)/2])
	grain := bytes.Index(vo[64<<10:], []byte{0x78}) + 64<<10 // the first zlib header behind the metadata
	add("vmdk stream damaged", api.Corrupt, "", edit(vo, func(b []byte) { copy(b[grain:], bytes.Repeat([]byte{0xff}, 40)) }))

	h, hd := c.image("vpc", "-o subformat=fixed,force_size=on"), c.image("vpc", "-o subformat=dynamic,force_size=on")
	end := len(h) - 512
	summed := func(b []byte, at int) {
		var s uint32
		be.PutUint32(b[at:], 0)
		for _, x := range b[:min(len(b), 512+(at&1)*512)] {
			s += uint32(x)
		}
		be.PutUint32(b[at:], ^s)
	}
	add("vhd footer", api.Corrupt, "checksum", edit(h, func(b []byte) { b[end+70]++ }))
	add("vhd too large", api.Corrupt, "cut off", edit(h, func(b []byte) {
		be.PutUint64(b[end+48:], 1<<30)
		summed(b[end:], 64)
	}))
	add("vhd much too small", api.Corrupt, "between the end of the disk", edit(h, func(b []byte) {
		be.PutUint64(b[end+48:], 1<<20)
		summed(b[end:], 64)
	}))
	add("vhd of nothing", api.Invalid, "no bytes", edit(h[8<<20-4096:], func(b []byte) {
		b = b[len(b)-512:]
		be.PutUint64(b[48:], 0)
		be.PutUint32(b[56:], 0)
		summed(b, 64)
	}))
	add("vhd without its start", api.Corrupt, "", edit(hd, func(b []byte) { clear(b[:512]) }))
	add("vhd cut", api.Corrupt, "", hd[:len(hd)/2])
	add("vhd block behind the file", api.Corrupt, "", edit(hd, func(b []byte) { be.PutUint32(b[1536:], 1<<31) }))
	add("vhd one block twice", api.Corrupt, "", edit(hd, func(b []byte) { copy(b[1540:1544], b[1536:1540]) }))
	add("vhd header", api.Corrupt, "checksum", edit(hd, func(b []byte) { b[512+40]++ }))
	add("vhd differencing", api.Unsupported, "differencing", edit(hd, func(b []byte) {
		for _, f := range [][]byte{b[:512], b[len(b)-512:]} {
			be.PutUint32(f[60:], 4)
			summed(f, 64)
		}
	}))

	x := c.image("vhdx", "")
	add("vhdx headers", api.Corrupt, "", edit(x, func(b []byte) { b[64<<10+20]++; b[128<<10+20]++ }))
	add("vhdx regions", api.Corrupt, "", edit(x, func(b []byte) { b[192<<10+20]++; b[256<<10+20]++ }))
	add("vhdx cut at 100 KiB", api.Corrupt, "cut off", x[:100<<10])
	add("vhdx cut at 2 MiB", api.Corrupt, "within the file", x[:2<<20])
	add("vhdx cut in its data", api.Corrupt, "cut off", x[:len(x)-4<<20])
	add("vhdx nothing but a name", api.Corrupt, "", []byte("vhdxfile"))

	g, z, zs := c.packed("gzip", content), c.packed("xz -0", content), c.packed("zstd -q", content)
	for name, p := range map[string][]byte{"gzip": g, "xz": z, "zstd": zs} {
		add(name+" cut", api.Corrupt, "too early", p[:len(p)-5])
		add(name+" cut in the middle", api.Corrupt, "", p[:len(p)/2])
		add(name+" with garbage behind", api.Corrupt, "follows its end", cat(p, []byte("garbage")))
		add(name+" damaged", api.Corrupt, "", edit(p, func(b []byte) { b[len(b)/2] ^= 0x55 }))
		add(name+" alone", api.Corrupt, "", p[:8])
	}
	add("an archive in an archive", api.Unsupported, "in an archive", c.packed("xz -0", g))
	add("an archive of nothing", api.Invalid, "empty", c.packed("gzip", nil))
	add("an archive of a page", api.Invalid, "text page", c.packed("gzip", []byte("<!DOCTYPE html><html></html>")))
	add("an archive of a tar", api.Unsupported, "tar",
		c.packed("zstd -q", cat(make([]byte, 257), []byte("ustar\x00"), content)))
	add("an archive of half a qcow2", api.Corrupt, "cut off", c.packed("xz -0", q[:len(q)/2]))
	add("an archive of a lying VMDK", api.OutOfRange, "", c.packed("gzip -1", edit(v, word(12, 1<<50))))
	add("an archive with a dictionary of 4 GiB", api.Corrupt, "", edit(z, func(b []byte) { b[16] = 40 }))
	add("LUKS", api.Unsupported, "encrypted", cat([]byte("LUKS\xba\xbe\x00\x02"), content))
	add("VDI", api.Unsupported, "VDI", cat([]byte("<<< Oracle VM VirtualBox Disk Image >>>\n"), content))
	add("bzip2", api.Unsupported, "bzip2", []byte("BZh91AY&SY"))
	return zoo
}

// TestZoo imports lying images from a file and from a stream to a real disk: the error is clear, nothing is left, and
// the memory does not follow the claims of the image.
func TestZoo(t *testing.T) {
	suite.Slow(t)
	dir := t.TempDir()
	d := newDisk(t, dir)
	zoo := hostile(t)
	if len(zoo) < 40 {
		t.Fatalf("%d animals are no zoo", len(zoo))
	}
	for _, a := range zoo {
		t.Run(a.name, func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "image")
			if err := os.WriteFile(name, a.b, 0o600); err != nil {
				t.Fatal(err)
			}
			for way, open := range map[string]func(context.Context) (*origin.Stream, error){
				"file": file(name), "stream": stream(a.b, true), "stream of unknown size": stream(a.b, false),
			} {
				over := watchMemory(t)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				_, err := importer.Import(ctx, d, newWant(), new(importer.Progress), open)
				cancel()
				if a.stream != "" && api.Is(err, api.Corrupt) && strings.Contains(err.Error(), a.stream) {
					err = api.Errorf(a.kind, "%s", a.text)
				}
				if err == nil || !api.Is(err, a.kind) || !strings.Contains(err.Error(), a.text) {
					t.Errorf("%s: got %v (kind %v), want %q of kind %v", way, err, api.KindOf(err), a.text, a.kind)
				}
				if n := over(); n > 128<<20 {
					t.Errorf("%s: took %d MiB of memory", way, n>>20)
				}
				if way == "file" {
					t.Log(err)
				}
			}
			clean(t, dir)
		})
	}
	t.Logf("%d hostile images", len(zoo))
}

// watchMemory watches the memory of the process, and returns a function which reports the largest growth.
func watchMemory(t *testing.T) func() int64 {
	t.Helper()
	debug.FreeOSMemory()
	resident := func() int64 {
		b, err := os.ReadFile("/proc/self/statm")
		if err != nil {
			t.Error(err)
			return 0
		}
		pages, _ := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
		return pages * int64(os.Getpagesize())
	}
	before, most := resident(), int64(0)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				most = max(most, resident()-before)
			}
		}
	}()
	return func() int64 {
		close(stop)
		<-ended
		runtime.GC()
		return max(most, resident()-before)
	}
}

// TestBombs: bombs of data end at the room of the disk, bombs of zeros are imported, and both need little memory.
func TestBombs(t *testing.T) {
	dir := smallFS(t, 60)
	d, err := stack.Add(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	made := func(tool string, fill byte, mib int) []byte {
		out := filepath.Join(t.TempDir(), "bomb")
		command(t, "sh", "-c", fmt.Sprintf("head -c %dM /dev/zero | tr '\\000' '\\%03o' | %s -c > %s", mib, fill, tool, out))
		return read(t, out)
	}
	for _, tool := range []string{"gzip -1", "xz -0 -T2", "zstd -q -T2"} {
		for fill, mib := range map[byte]int{0: 256, 'a': 80} {
			b := made(tool, fill, mib)
			over := watchMemory(t)
			_, err := importer.Import(t.Context(), d, newWant(), new(importer.Progress), stream(b, true))
			grew := over()
			t.Logf("%s, %d MiB of %d in %d bytes: %d MiB of memory: %v", tool, mib, fill, len(b), grew>>20, err)
			if fill == 'a' && !api.Is(err, api.Full) || fill == 0 && err != nil {
				t.Errorf("%s, %d MiB of %d: %v", tool, mib, fill, err)
			}
			if grew > 128<<20 {
				t.Errorf("%s: took %d MiB of memory", tool, grew>>20)
			}
		}
	}
}

// TestLargeWindows: archives with the largest windows need little memory. The importer puts the rest on the image's
// disk, because the folder for temporary files may be in memory.
func TestLargeWindows(t *testing.T) {
	suite.Long(t)
	d := newDisk(t, t.TempDir())
	half := sample(80 << 20)
	for tool, content := range map[string][]byte{
		"zstd -q -1 --long=27 -T1 -c": cat(half, half), "xz -T1 --lzma2=preset=0,dict=64MiB -c": half,
	} {
		name := filepath.Join(t.TempDir(), "content")
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
		out := filepath.Join(t.TempDir(), "packed")
		command(t, "sh", "-c", tool+" "+name+" > "+out)
		t.Setenv("TMPDIR", "/nowhere")
		over := watchMemory(t)
		got, err := importer.Import(t.Context(), d, newWant(), new(importer.Progress), file(out))
		grew := over()
		if err != nil || got.VirtualSize != int64(len(content)) {
			t.Fatalf("%s: %+v, %v", tool, got, err)
		}
		t.Logf("%s: %d MiB of memory", tool, grew>>20)
		if grew > 160<<20 {
			t.Errorf("%s: took %d MiB of memory", tool, grew>>20)
		}
	}
}
