package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// samples are contents of all sorts: the special cases of each decoder, and sizes around the buffers.
func samples(t testing.TB) map[string][]byte {
	rng := rand.New(rand.NewChaCha8([32]byte{1}))
	random := make([]byte, 1<<20)
	for i := 0; i < len(random); i += 8 {
		binary.LittleEndian.PutUint64(random[i:], rng.Uint64())
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string][]byte{
		"empty":  {},
		"byte":   {7},
		"zeros":  make([]byte, 9<<20+123),
		"random": random,
		"code":   code[1<<20 : 3<<20+7],
	}
	var text bytes.Buffer
	for i := 0; text.Len() < 1<<20; i++ {
		fmt.Fprintf(&text, "%d: node-%d says %x to disk %d\n", i, rng.IntN(9), rng.Uint32(), rng.IntN(100))
	}
	m["text"] = text.Bytes()
	disk := make([]byte, 6<<20)
	copy(disk[1<<20:], code[:500000])
	copy(disk[3<<20+4096:], random[:100000])
	copy(disk[4<<20:], text.Bytes()[:300000])
	copy(disk[5<<20+77:], disk[1<<20:3<<19-100])
	m["disk"] = disk
	var periods bytes.Buffer
	for _, n := range []int{1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 100, 257, 259, 273, 274, 5000, 40000} {
		for range 40000/n + 2 {
			periods.Write(random[n : 2*n])
		}
	}
	m["periods"] = periods.Bytes()
	skewed := make([]byte, 300000)
	for i := range skewed {
		v := 0
		for v < 200 && rng.Uint32()%3 != 0 {
			v++
		}
		skewed[i] = byte(v)
	}
	m["skewed"] = skewed
	for _, n := range []int{4096, 65535, 65536, 65537, 131072, 262144, 262145} {
		m[fmt.Sprintf("code-%d", n)] = code[100000 : 100000+n]
	}
	return m
}

// run returns a tool's output for an input.
func run(t testing.TB, in []byte, args ...string) []byte {
	t.Helper()
	suite.Slow(t)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = bytes.NewReader(in)
	var out, msg bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %v: %s (Debian packages gzip, xz-utils, zstd)", args, err, msg.String())
	}
	return out.Bytes()
}

func unpack(b []byte, lim Limits) ([]byte, error) {
	var out bytes.Buffer
	err := unpackTo(&out, bytes.NewReader(b), lim)
	return out.Bytes(), err
}

// mustUnpack unpacks in several ways and compares.
func mustUnpack(t *testing.T, packed, want []byte) {
	t.Helper()
	got, err := unpack(packed, Limits{})
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes, which differ: %v; %v", len(got), !bytes.Equal(got, want), err)
	}
	for name, src := range map[string]io.Reader{
		"halves": iotest.HalfReader(bytes.NewReader(packed)),
		"eof":    iotest.DataErrReader(bytes.NewReader(packed)),
		"bytes":  iotest.OneByteReader(bytes.NewReader(packed)),
	} {
		if name == "bytes" && len(packed) > 100000 {
			continue
		}
		r, err := NewReader(src, Detect(packed), Limits{})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		// Reads of odd sizes, not WriteTo.
		_, err = io.CopyBuffer(&out, struct{ io.Reader }{r}, make([]byte, 77777))
		if err != nil || !bytes.Equal(out.Bytes(), want) {
			t.Fatalf("%s: %d bytes, which differ: %v; %v", name, out.Len(), !bytes.Equal(out.Bytes(), want), err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// oracles are ways to pack; few marks slow ways, and ways which differ only around the data. Unless the run wants all,
// a single way of each format packs every sample.
var oracles = []struct {
	tool string
	few  bool
}{
	{"gzip -1", false}, {"gzip -6", true}, {"gzip -9", false}, {"gzip -6 --rsyncable", true},
	{"xz -0", false}, {"xz -6", false}, {"xz -6e", true}, {"xz -3 --check=none", true}, {"xz -3 --check=crc32", true},
	{"xz -3 --check=crc64", true}, {"xz -3 --check=sha256", true}, {"xz -3 -T2 --block-size=300KiB", false},
	{"xz -1 -T2 --block-size=64KiB --check=sha256", true}, {"xz -3 --block-list=100000,1,200000,0", true},
	{"xz --lzma2=preset=6,lc=0,lp=4,pb=0", true}, {"xz --lzma2=preset=4,lc=4,lp=0,pb=4", true},
	{"xz --lzma2=preset=1,dict=4KiB", true}, {"xz --lzma2=preset=1,dict=64KiB,nice=273", true},
	{"xz --lzma2=preset=1,dict=64MiB", true},
	{"zstd -1", false}, {"zstd -3", false}, {"zstd -12", false}, {"zstd -19", true}, {"zstd --ultra -22", true},
	{"zstd --fast=7", false}, {"zstd -3 --long=27", false}, {"zstd -3 --rsyncable", true}, {"zstd -3 --no-check", true},
	{"zstd -3 --no-content-size", true}, {"zstd -5 -T2 -B512KiB", false}, {"zstd -1 --zstd=wlog=10", false},
	{"zstd -3 --no-compress-literals", true}, {"zstd -3 --compress-literals", true},
}

// TestOracles unpacks the tools' archives.
func TestOracles(t *testing.T) {
	all := samples(t)
	most := []string{"gzip -1", "xz -0", "zstd -3"}
	for _, o := range oracles {
		few := o.few || !suite.All() && !slices.Contains(most, o.tool)
		t.Run(o.tool, func(t *testing.T) {
			t.Parallel()
			for name, want := range all {
				if few && name != "disk" && name != "empty" && name != "skewed" {
					continue
				}
				packed := run(t, want, append(strings.Fields(o.tool), "-c")...)
				t.Run(name, func(t *testing.T) { mustUnpack(t, packed, want) })
			}
		})
	}
}

// TestFiles unpacks archives of a file, with more in the headers: names, times, sizes.
func TestFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "some disk.img")
	want := samples(t)["disk"][4<<20 : 4<<20+400000]
	if err := os.WriteFile(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, o := range oracles {
		mustUnpack(t, run(t, nil, append(strings.Fields(o.tool), "-c", path)...), want)
	}
}

// TestXz9: the largest dictionary of a preset.
func TestXz9(t *testing.T) {
	want := samples(t)["disk"]
	packed := run(t, want, "xz", "-9", "-c")
	mustUnpack(t, packed, want)
}

func skippable(n int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, skipMagic+5)
	return append(binary.LittleEndian.AppendUint32(b, uint32(n)), make([]byte, n)...)
}

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// TestConcatenated: archives in sequence unpack like a single archive, with the padding allowed by each format.
func TestConcatenated(t *testing.T) {
	all := samples(t)
	a, b, e := all["code-65537"], all["text"], []byte{}
	want := cat(a, b, a)
	for _, tool := range []string{"gzip", "xz -0", "xz -T2 -0 --block-size=64KiB", "zstd",
		"zstd --no-content-size --no-check"} {
		t.Run(tool, func(t *testing.T) {
			args := append(strings.Fields(tool), "-c")
			pa, pb, pe := run(t, a, args...), run(t, b, args...), run(t, e, args...)
			mustUnpack(t, cat(pa, pb, pe, pa), want)
			mustUnpack(t, cat(pe, pa, pb, pa, pe), want)
			mustUnpack(t, cat(pe, pe), e)
			switch args[0] {
			case "gzip":
				mustUnpack(t, cat(pa, pb, pa, make([]byte, 1000)), want)
			case "xz":
				big := run(t, b, "xz", "-6", "-c", "--check=sha256")
				zeros := make([]byte, 400)
				mustUnpack(t, cat(pa, zeros, big, zeros[:4], pa, zeros), want)
			case "zstd":
				big := run(t, b, "zstd", "--long=27", "--no-content-size", "-c")
				mustUnpack(t, cat(skippable(0), pa, skippable(300000), big, skippable(7), pa, skippable(1)), want)
			}
		})
	}
}

// TestGzipHeader: the reader accepts the fields never written by the gzip program.
func TestGzipHeader(t *testing.T) {
	want := []byte("hello hello hello")
	z := run(t, want, "gzip", "-nc")
	for flags := range byte(32) {
		b := bytes.Clone(z[:10])
		b[3] = flags
		if flags&(1<<2) != 0 {
			b = append(b, 3, 0, 'a', 'b', 'c')
		}
		if flags&(1<<3) != 0 {
			b = append(b, "name\x00"...)
		}
		if flags&(1<<4) != 0 {
			b = append(b, "comment\x00"...)
		}
		if flags&(1<<1) != 0 {
			b = binary.LittleEndian.AppendUint16(b, uint16(crc(b)))
		}
		mustUnpack(t, append(b, z[10:]...), want)
	}
}

func TestDetect(t *testing.T) {
	for _, c := range []struct {
		head string
		want Format
	}{
		{"", None}, {"\x1f\x8b", None}, {"\x1f\x8b\x08", Gzip}, {"\x1f\x8b\x07\x00\x00\x00", None}, {xzMagic, Xz},
		{xzMagic[:5], None}, {"\x28\xb5\x2f\xfd\x00\x00", Zstd}, {"\x50\x2a\x4d\x18", Zstd}, {"\x5f\x2a\x4d\x18", Zstd},
		{"\x60\x2a\x4d\x18", None}, {"QFI\xfb\x00\x00", None},
	} {
		if got := Detect([]byte(c.head)); got != c.want {
			t.Errorf("%q is %v, not %v", c.head, got, c.want)
		}
	}
	if _, err := NewReader(nil, None, Limits{}); !api.Is(err, api.Unsupported) {
		t.Errorf("no format: %v", err)
	}
}

// TestLimit: an archive unpacks up to the limit, and not a byte more, however small the archive.
func TestLimit(t *testing.T) {
	zeros := make([]byte, 20<<20)
	for _, tool := range []string{"gzip -9", "xz -6", "xz -T2 --block-size=4MiB", "zstd -19", "zstd --no-content-size"} {
		z := run(t, zeros, append(strings.Fields(tool), "-c")...)
		if got, err := unpack(z, Limits{Output: int64(len(zeros))}); err != nil || len(got) != len(zeros) {
			t.Errorf("%s: %d bytes: %v", tool, len(got), err)
		}
		for _, most := range []int{1, 1 << 20, len(zeros) - 1} {
			got, err := unpack(z, Limits{Output: int64(most)})
			if !api.Is(err, api.OutOfRange) || !strings.Contains(fmt.Sprint(err), ErrTooLarge.Error()) || len(got) > most {
				t.Errorf("%s, limit %d: %d bytes: %v", tool, most, len(got), err)
			}
		}
	}
}

// TestClose: a reader closed anywhere leaves no goroutine behind, and reads no more.
func TestClose(t *testing.T) {
	text := bytes.Repeat(samples(t)["text"], 10)
	for _, tool := range []string{"gzip", "xz -0", "xz -0 -T2 --block-size=1MiB", "zstd", "zstd -B64KiB"} {
		z := run(t, text, append(strings.Fields(tool), "-c")...)
		before := runtime.NumGoroutine()
		for _, n := range []int{-1, 0, 1, 300000, 9 << 20} {
			r, err := NewReader(bytes.NewReader(z), Detect(z), Limits{})
			if err != nil {
				t.Fatal(err)
			}
			if n >= 0 {
				if _, err := io.ReadFull(r, make([]byte, n)); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if n, err := r.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Errorf("%s: a closed reader reads %d bytes: %v", tool, n, err)
			}
		}
		// A goroutine counts until the end, shortly after the close.
		for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatalf("%s: %d goroutines more", tool, runtime.NumGoroutine()-before)
			}
		}
	}
}

// TestSourceError: the reader returns the source's error unchanged, after the bytes before the error.
func TestSourceError(t *testing.T) {
	text := samples(t)["text"]
	for _, tool := range []string{"gzip", "xz -0", "xz -0 -T2 --block-size=100KiB", "zstd"} {
		z := run(t, text, append(strings.Fields(tool), "-c")...)
		want := api.Errorf(api.Unavailable, "the server is gone")
		for _, n := range []int{0, 3, 20, len(z) / 2, len(z)} {
			src := io.MultiReader(bytes.NewReader(z[:n]), iotest.ErrReader(want))
			r, err := NewReader(src, Detect(z), Limits{})
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			if !api.Is(err, api.Unavailable) || !bytes.HasPrefix(text, got) {
				t.Errorf("%s cut after %d bytes: %v", tool, n, err)
			}
			r.Close()
		}
	}
}

// TestStalled: a read fails if the source gives no bytes.
func TestStalled(t *testing.T) {
	r, err := NewReader(nothing{}, Gzip, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	done := make(chan error, 1)
	go func() {
		_, err := r.Read(make([]byte, 10))
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, io.ErrNoProgress) {
			t.Errorf("a source that gives nothing: %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("a source that gives nothing is read for ever")
	}
}

type nothing struct{}

func (nothing) Read([]byte) (int, error) { return 0, nil }
