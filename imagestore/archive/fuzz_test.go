package archive

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"testing"

	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
)

// fuzzMost bounds what one input may unpack to: fuzzing is about structure, not about size.
const fuzzMost = 1 << 20

// known fails for errors that no hostile archive may cause.
func known(t *testing.T, err error) {
	t.Helper()
	switch api.KindOf(err) {
	case api.Corrupt, api.Unsupported, api.OutOfRange:
	default:
		t.Fatalf("error %v of kind %v", err, api.KindOf(err))
	}
}

func seeds(f *testing.F, tools ...[]string) {
	all := samples(f)
	for _, args := range tools {
		for _, name := range []string{"empty", "byte", "code-4096", "text", "periods", "skewed", "zeros"} {
			b := all[name]
			f.Add(run(f, b[:min(len(b), 20000)], args...))
		}
	}
}

func FuzzGzip(f *testing.F) {
	seeds(f, []string{"gzip", "-1c"}, []string{"gzip", "-9c"})
	f.Fuzz(func(t *testing.T, b []byte) {
		if Detect(b) != Gzip {
			return
		}
		got, err := unpack(b, Limits{Output: fuzzMost})
		if err != nil {
			known(t, err)
		}
		if api.Is(err, api.Unsupported) || api.Is(err, api.OutOfRange) {
			return
		}
		var want []byte
		r, werr := gzip.NewReader(bytes.NewReader(b))
		if werr == nil {
			want, werr = io.ReadAll(io.LimitReader(r, fuzzMost+1))
		}
		if len(want) > fuzzMost {
			return
		}
		if err == nil && !bytes.Equal(got, want) {
			t.Fatalf("%d bytes, not %d as another decoder has it (%v)", len(got), len(want), werr)
		}
		// The other decoder takes zeros at the end for a member.
		if (err == nil) != (werr == nil) && !errors.Is(err, ErrTrailing) && !bytes.HasSuffix(b, []byte{0}) {
			t.Fatalf("%v, but another decoder says %v", err, werr)
		}
	})
}

func FuzzZstd(f *testing.F) {
	seeds(f, []string{"zstd", "-1c"}, []string{"zstd", "-19c"}, []string{"zstd", "-19c", "--no-check"},
		[]string{"zstd", "-c", "--zstd=wlog=10", "--no-check"})
	f.Add(cat(skippable(3), run(f, []byte("hello hello"), "zstd", "-c")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if Detect(b) != Zstd {
			return
		}
		got, err := unpack(b, Limits{Output: fuzzMost})
		if err != nil {
			known(t, err)
		}
		if api.Is(err, api.Unsupported) || api.Is(err, api.OutOfRange) {
			return
		}
		z, werr := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if werr != nil {
			t.Fatal(werr)
		}
		defer z.Close()
		want, werr := io.ReadAll(io.LimitReader(z, fuzzMost+1))
		if len(want) > fuzzMost {
			return
		}
		if err == nil && werr == nil && !bytes.Equal(got, want) {
			t.Fatalf("%d bytes, not %d as another decoder has it", len(got), len(want))
		}
		if err == nil && werr != nil && !errors.Is(werr, zstd.ErrWindowSizeTooSmall) {
			t.Fatalf("no error, but another decoder says %v", werr)
		}
		if err != nil && werr == nil {
			t.Fatalf("%v, but another decoder has no error", err)
		}
	})
}

func FuzzXz(f *testing.F) {
	seeds(f, []string{"xz", "-0c"}, []string{"xz", "-6c", "--check=none"},
		[]string{"xz", "-0c", "-T2", "--block-size=4096"})
	f.Fuzz(func(t *testing.T, b []byte) {
		if Detect(b) != Xz {
			return
		}
		got, err := unpack(b, Limits{Output: fuzzMost})
		if err != nil {
			known(t, err)
		}
		if len(got) > fuzzMost {
			t.Fatalf("%d bytes", len(got))
		}
	})
}

// FuzzLZMA2 compares the chunks alone, which no checksum protects, with another decoder.
func FuzzLZMA2(f *testing.F) {
	all := samples(f)
	for _, level := range []string{"-0", "-6", "--lzma2=preset=6,lc=0,lp=2,pb=0", "--lzma2=dict=4KiB"} {
		for _, name := range []string{"byte", "code-4096", "text", "periods", "skewed", "zeros", "random"} {
			b := all[name]
			z := run(f, b[:min(len(b), 20000)], "xz", "--format=raw", "-c", level)
			f.Add(z, uint16(4096))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, w uint16) {
		window := max(int(w), 4096)
		want, werr := reference(b, window, fuzzMost)
		if len(want) >= fuzzMost {
			return
		}
		got, err := chunks(b, window)
		if (err == nil) != (werr == nil) || err == nil && !bytes.Equal(got, want) {
			t.Fatalf("%d bytes, %v; another decoder says %d bytes, %v", len(got), err, len(want), werr)
		}
	})
}

// chunks decodes bare LZMA2 through a small ring that starts near its end, so that it wraps.
func chunks(b []byte, window int) ([]byte, error) {
	total := 0
	g, err := newRing(pieceSize+slack+2*ringAlign, 16, func(n int) error {
		if total += n; total > fuzzMost+pieceSize+slack {
			return ErrTooLarge
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	defer g.free()
	g.pos = g.size - 5000
	g.sent = g.pos
	g.near = min(g.near, window)
	var out bytes.Buffer
	done := make(chan struct{})
	go func() {
		defer close(done)
		for it := range g.out {
			out.Write(it.b)
			g.release(len(it.b))
		}
	}()
	m := &memory{"xz", b}
	err = new(lzma).lzma2(g, m, window)
	close(g.out)
	<-done
	if err == nil && len(m.b) > 0 {
		err = corrupt("more")
	}
	return out.Bytes(), err
}

// FuzzContinue: where an archive unpacks, it does so from every place in it; where it does not, neither does the rest.
func FuzzContinue(f *testing.F) {
	seeds(f, []string{"gzip", "-1c"}, []string{"zstd", "-1c"}, []string{"xz", "-0c"},
		[]string{"xz", "-0c", "--check=none"}, []string{"xz", "-0c", "-T2", "--block-size=4096"},
		[]string{"zstd", "-c", "--zstd=wlog=10", "--no-check"})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := NewReader(bytes.NewReader(b), Detect(b), Limits{Output: fuzzMost})
		if err != nil {
			return
		}
		plain, points, err := pointed(t, r, 1000)
		for i := 0; i < len(points); i += 1 + len(points)/8 {
			p := points[i]
			got, rerr := rest(t, b, plain, p, Limits{Output: fuzzMost})
			if (err == nil) != (rerr == nil) || err == nil && !bytes.Equal(got, plain[p.Plain:]) {
				t.Fatalf("from %d: %d bytes and %v, not %d and %v", p.Plain, len(got), rerr, len(plain)-int(p.Plain), err)
			}
		}
	})
}
