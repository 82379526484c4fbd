package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

func TestDisksOfEveryPacking(t *testing.T) {
	suite.Slow(t)
	dir := t.TempDir()
	raw := append(noise(3<<20), make([]byte, 5<<20)...)
	if err := os.MkdirAll(filepath.Join(dir, "disk"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "disk/disk.raw"), raw, 0o644); err != nil {
		t.Fatal(err)
	}
	// Layers as real tools make them.
	run(t, dir, "tar", "-cf", "raw.tar", "disk")
	run(t, dir, "qemu-img", "convert", "-c", "-O", "qcow2", "disk/disk.raw", "disk.qcow2")
	run(t, dir, "sh", "-c", "rm disk/* && mv disk.qcow2 disk/fedora.qcow2")
	run(t, dir, "tar", "--format=pax", "--owner=107", "--group=107", "-cf", "qcow2.tar", "./disk")
	contents := map[string][]byte{"raw": raw, "qcow2": load(t, dir, "disk/fedora.qcow2")}
	for disk := range contents {
		run(t, dir, "gzip", "-k", disk+".tar")
		run(t, dir, "zstd", "-q", "-19", disk+".tar")
	}
	w := plainWorld(t)
	for disk, want := range contents {
		for _, p := range []struct {
			file string
			man  types.MediaType
			kind types.MediaType
		}{
			{".tar", types.OCIManifestSchema1, types.OCIUncompressedLayer},
			{".tar.gz", types.OCIManifestSchema1, types.OCILayer},
			{".tar.zst", types.OCIManifestSchema1, types.OCILayerZStd},
			{".tar", types.DockerManifestSchema2, types.DockerUncompressedLayer},
			{".tar.gz", types.DockerManifestSchema2, types.DockerLayer},
			{".tar.zst", types.DockerManifestSchema2, types.DockerLayer}, // a wrong media type, as in practice
		} {
			t.Run(fmt.Sprint(disk, p.file, " ", p.man), func(t *testing.T) {
				layer := w.blob("disks/fedora", p.kind, load(t, dir, disk+p.file))
				d := w.manifest("disks/fedora", "42", p.man, image(p.man, layer))
				var resolved string
				o := quick
				o.Resolved = func(d string) { resolved = d }
				same(t, w.ref("disks/fedora:42"), o, want)
				if resolved != d["digest"] {
					t.Errorf("resolved to %s instead of %s", resolved, d["digest"])
				}
				same(t, w.ref("disks/fedora@"+resolved), quick, want)
				same(t, w.ref("disks/fedora:42@"+resolved), quick, want)
			})
		}
	}
}

func TestLayersHideOneAnother(t *testing.T) {
	w := plainWorld(t)
	a, b := noise(100_000), []byte("another one")
	base := tarOf(t, file{name: "etc/passwd", body: b}, file{name: "usr/bin/sh", body: noise(50_000)})
	for name, c := range map[string]struct {
		layers [][]byte
		want   []byte
	}{
		"a disk over a system": {[][]byte{base, disked(t, a)}, a},
		"a disk below others":  {[][]byte{disked(t, a), base, tarOf(t)}, a},
		"replaced":             {[][]byte{disked(t, b), disked(t, a)}, a},
		"another name in place": {[][]byte{tarOf(t, file{name: "disk/old", body: b}),
			tarOf(t, file{name: "disk/.wh.old"}, file{name: "disk/new", body: a})}, a},
		"opaque folder": {[][]byte{tarOf(t, file{name: "disk/old", body: b}),
			tarOf(t, file{name: "disk/new", body: a}, file{name: "disk/.wh..wh..opq"})}, a},
		"folder removed first": {[][]byte{tarOf(t, file{name: "disk/old", body: b}), tarOf(t, file{name: ".wh.disk"}),
			tarOf(t, file{name: "disk/new", body: a})}, a},
		"folders do not count": {[][]byte{tarOf(t, file{name: "/disk/sub/", kind: tar.TypeDir},
			file{name: "./disk/sub/x", body: b}, file{name: "/disk//x.img", body: a}, file{name: "mnt/disk/x", body: b})}, a},
		"a name with dots is none": {[][]byte{tarOf(t, file{name: "../disk/x", body: b},
			file{name: "disk/../../etc/x", body: b}, file{name: "disk/x", body: a})}, a},
		"empty file": {[][]byte{disked(t, nil)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w.image("l", "1", c.layers...)
			same(t, w.ref("l:1"), quick, c.want)
		})
	}
}

func TestNoSingleDisk(t *testing.T) {
	w := plainWorld(t)
	x := []byte("x")
	claim := func(h tar.Header) []byte {
		var buf bytes.Buffer
		h.Typeflag, h.Mode = tar.TypeReg, 0o644
		if err := tar.NewWriter(&buf).WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		return append(buf.Bytes(), make([]byte, 4096)...)
	}
	dir := t.TempDir()
	run(t, dir, "sh", "-c", "mkdir disk && truncate -s 1M disk/d && echo x >>disk/d")
	run(t, dir, "tar", "--format=gnu", "-Scf", "gnu.tar", "disk")
	run(t, dir, "tar", "--format=pax", "-Scf", "pax.tar", "disk")
	// An extended header of 2 MiB: a file with another type, and so another checksum.
	endless := tarOf(t, file{name: "disk/a", body: make([]byte, 2<<20)})
	endless[156] = 'x'
	copy(endless[148:], fmt.Sprintf("%06o\x00 ", headerSum(endless[:512])))
	many := make([]file, maxHidden+1)
	for i := range many {
		many[i] = file{name: fmt.Sprintf("disk/.wh.%d", i)}
	}
	for name, c := range map[string]struct {
		layers [][]byte
		kind   api.Kind
		text   string
	}{
		"no file": {[][]byte{tarOf(t, file{name: "etc/passwd", body: x}, file{name: "bin/sh", body: x})}, api.Invalid,
			"not a containerDisk: the image has no file in /disk/ (it has /etc /bin)"},
		"nothing at all":  {[][]byte{tarOf(t)}, api.Invalid, "it is empty"},
		"only a folder":   {[][]byte{tarOf(t, file{name: "disk/", kind: tar.TypeDir})}, api.Invalid, "no file in /disk/"},
		"disk is a file":  {[][]byte{tarOf(t, file{name: "disk", body: x})}, api.Invalid, "(it has /disk)"},
		"removed":         {[][]byte{disked(t, x), tarOf(t, file{name: "disk/.wh.disk.img"})}, api.Invalid, "no file"},
		"removed at once": {[][]byte{disked(t, x), tarOf(t, file{name: ".wh.disk"})}, api.Invalid, "no file"},
		"two": {[][]byte{tarOf(t, file{name: "disk/a.img", body: x}, file{name: "disk/b\n.img", body: x})}, api.Invalid,
			`more than one file in /disk/ ("/disk/a.img" and "/disk/b .img")`},
		"two in two layers": {[][]byte{tarOf(t, file{name: "disk/a", body: x}), tarOf(t, file{name: "disk/b", body: x})},
			api.Invalid, `("/disk/b" and "/disk/a")`},
		"one twice": {[][]byte{tarOf(t, file{name: "disk/a", body: x}, file{name: "./disk/a", body: x})}, api.Corrupt,
			"twice in one layer"},
		"symbolic link": {[][]byte{tarOf(t, file{name: "disk/a", kind: tar.TypeSymlink, link: "/etc/shadow"})},
			api.Unsupported, `a link to "/etc/shadow"`},
		"hard link": {[][]byte{tarOf(t, file{name: "x", body: x}, file{name: "disk/a", kind: tar.TypeLink, link: "x"})},
			api.Unsupported, "a link to"},
		"device":         {[][]byte{tarOf(t, file{name: "disk/a", kind: tar.TypeBlock})}, api.Unsupported, "no file"},
		"sparse, GNU":    {[][]byte{load(t, dir, "gnu.tar")}, api.Unsupported, "sparse"},
		"sparse, PAX":    {[][]byte{load(t, dir, "pax.tar")}, api.Unsupported, "sparse"},
		"claims 8 EiB":   {[][]byte{claim(tar.Header{Name: "disk/a", Size: 1<<63 - 1})}, api.OutOfRange, "than a volume"},
		"claims 1 TiB":   {[][]byte{claim(tar.Header{Name: "disk/a", Size: 1 << 40})}, api.Corrupt, "1099511627776 bytes"},
		"claims 64 KiB":  {[][]byte{claim(tar.Header{Name: "disk/a", Size: 64 << 10})}, api.Corrupt, "damaged"},
		"huge beside it": {[][]byte{claim(tar.Header{Name: "a", Size: 1 << 50})}, api.OutOfRange, "64 GiB beside the disk"},
		"long name": {[][]byte{tarOf(t, file{name: "disk/" + strings.Repeat("n", 5000), body: x})}, api.Corrupt,
			"a name of 5000 bytes"},
		"endless header": {[][]byte{endless}, api.Corrupt, "damaged"},
		"many whiteouts": {[][]byte{tarOf(t, many...)}, api.OutOfRange, "removes more than"},
		"no archive":     {[][]byte{noise(5000)}, api.Corrupt, "no archive that can be read"},
	} {
		t.Run(name, func(t *testing.T) {
			w.image("n", "1", c.layers...)
			_, _, err := fetch(t, w.ref("n:1"), quick)
			fails(t, err, c.kind, c.text)
		})
	}
	t.Run("claims more than the layer", func(t *testing.T) {
		layer := w.blob("n", types.OCIUncompressedLayer, claim(tar.Header{Name: "disk/a", Size: 1 << 30}))
		w.manifest("n", "1", types.OCIManifestSchema1, image(types.OCIManifestSchema1, layer))
		_, _, err := fetch(t, w.ref("n:1"), quick)
		fails(t, err, api.Corrupt, "in a layer of 4608")
	})
}

func headerSum(h []byte) (sum int) {
	for i, b := range h {
		if i >= 148 && i < 156 {
			b = ' '
		}
		sum += int(b)
	}
	return sum
}

func TestReferences(t *testing.T) {
	for _, ref := range []string{"docker://registry.example.com/a", "docker://registry.example.com:5000/a/b/c:v1",
		"docker://localhost/a", "docker://[::1]:5000/a:b", "docker://registry.example.com/a@" + digest(nil),
		"docker://registry.example.com/a:v1@" + digest(nil)} {
		if err := Check(ref); err != nil {
			t.Errorf("%s: %v", ref, err)
		}
	}
	for _, ref := range []string{"", "docker://", "registry.example.com/a", "https://registry.example.com/a",
		"docker:registry.example.com/a", "docker://fedora", "docker://library/fedora", "docker://registry.example.com",
		"docker://registry.example.com/", "docker://registry.example.com/A", "docker://registry.example.com/a:",
		"docker://registry.example.com/a@sha256:12", "docker://user:hunter2@registry.example.com/a",
		"docker://registry.example.com/a?x=y", "docker://registry.example.com/a:v1\n"} {
		fails(t, Check(ref), api.Invalid, "")
	}
}

func TestPlatforms(t *testing.T) {
	w := plainWorld(t)
	var index []object
	add := func(os, arch, variant, disk string) {
		d := w.image("p", "x", disked(t, []byte(disk)))
		d["platform"] = object{"os": os, "architecture": arch, "variant": variant}
		index = append(index, d)
	}
	push := func(kind types.MediaType) {
		w.manifest("p", "1", kind, object{"schemaVersion": 2, "mediaType": kind, "manifests": index})
	}
	add("unknown", "unknown", "", "a signature")
	add("windows", "amd64", "", "for windows")
	add("linux", "amd64", "v3", "for new ones")
	add("linux", "amd64", "", "for amd64")
	add("linux", "arm64", "v8", "for arm64")
	for _, kind := range []types.MediaType{types.OCIImageIndex, types.DockerManifestList} {
		push(kind)
		for _, arch := range []string{"amd64", "arm64"} {
			o := quick
			o.Arch = arch
			same(t, w.ref("p:1"), o, []byte("for "+arch))
		}
	}
	o := quick
	o.Arch = "s390x"
	_, _, err := fetch(t, w.ref("p:1"), o)
	fails(t, err, api.NotFound, "no image for linux/s390x, only for: windows/amd64, linux/amd64/v3")

	index = index[:2] // a signature, and the only image
	push(types.OCIImageIndex)
	same(t, w.ref("p:1"), quick, []byte("for windows"))
}

func TestManifestsThatAreNone(t *testing.T) {
	w := plainWorld(t)
	layer := w.blob("m", types.OCILayer, pack(t, "gzip", disked(t, []byte("x"))))
	times := func(n int, o object) (all []object) {
		for range n {
			all = append(all, o)
		}
		return all
	}
	with := func(o object, k string, v any) object {
		c := object{k: v}
		for key := range o {
			if key != k {
				c[key] = o[key]
			}
		}
		return c
	}
	const oci, idx = types.OCIManifestSchema1, types.OCIImageIndex
	good := image(oci, layer)
	only := []object{w.manifest("m", "g", oci, good)}
	inner := w.manifest("m", "inner", idx, object{"schemaVersion": 2, "manifests": only})
	for name, c := range map[string]struct {
		kind types.MediaType
		m    object
		err  api.Kind
		text string
	}{
		"no layers":        {oci, image(oci), api.Invalid, "no layers"},
		"many layers":      {oci, image(oci, times(129, layer)...), api.OutOfRange, "129 layers"},
		"no end of layers": {oci, image(oci, times(5000, layer)...), api.OutOfRange, "more than 1000 entries"},
		"a chart": {oci, image(oci, with(layer, "mediaType", "application/vnd.cncf.helm.chart.content.v1.tar+gzip")),
			api.Invalid, "not a containerDisk"},
		"encrypted layer": {oci, image(oci, with(layer, "mediaType", types.OCILayer+"+encrypted")), api.Invalid,
			"+encrypted"},
		"negative size": {oci, image(oci, with(layer, "size", -1)), api.Corrupt, "-1 bytes"},
		"huge size":     {oci, image(oci, with(layer, "size", int64(1)<<62)), api.Corrupt, "4611686018427387904 bytes"},
		"another size":  {oci, image(oci, with(layer, "size", 99)), api.Corrupt, "and 99 in the manifest"},
		"no digest":     {oci, image(oci, with(layer, "digest", nil)), api.Corrupt, "cannot be read"},
		"odd digest":    {oci, image(oci, with(layer, "digest", "sha256:../../x")), api.Corrupt, "cannot be read"},
		"missing layer": {oci, image(oci, with(layer, "digest", digest([]byte("gone")))), api.NotFound,
			"does not have layer"},
		"schema 1": {types.DockerManifestSchema1, object{"schemaVersion": 1, "fsLayers": []object{{"blobSum": "x"}}},
			api.Unsupported, "schema 1"},
		"both":           {oci, with(good, "manifests", []object{inner}), api.Corrupt, "both an image and an index"},
		"both, as index": {idx, with(with(good, "mediaType", idx), "manifests", []object{inner}), api.Corrupt, "both"},
		"empty index":    {idx, object{"schemaVersion": 2, "mediaType": idx}, api.Invalid, "names no image"},
		"index of indexes": {idx, object{"schemaVersion": 2, "manifests": []object{inner}}, api.Unsupported,
			"another index"},
		"of another type": {"application/json", object{"schemaVersion": 2}, api.Invalid, `of type "application/json"`},
		"too large":       {oci, with(good, "annotations", object{"x": strings.Repeat("x", 5<<20)}), api.OutOfRange, "4 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			w.manifest("m", "1", c.kind, c.m)
			_, _, err := fetch(t, w.ref("m:1"), quick)
			fails(t, err, c.err, c.text)
		})
	}
	t.Run("no such tag", func(t *testing.T) {
		_, _, err := fetch(t, w.ref("m:none"), quick)
		fails(t, err, api.NotFound, "does not have none")
	})
	t.Run("no such repository", func(t *testing.T) {
		_, _, err := fetch(t, w.ref("nowhere:1"), quick)
		fails(t, err, api.NotFound, "does not have 1")
	})
}

func TestItIsCancelled(t *testing.T) {
	w := plainWorld(t)
	w.image("c", "1", disked(t, noise(20<<20)))
	ctx, cancel := context.WithCancel(t.Context())
	s, err := Open(ctx, w.ref("c:1"), quick)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := io.ReadFull(s, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.Copy(io.Discard, s); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want that it was cancelled", err)
	}
	if err := s.Settled(); !errors.Is(err, context.Canceled) {
		t.Fatalf("settled: got %v, want that it was cancelled", err)
	}
	if _, err := Open(ctx, w.ref("c:1"), quick); !errors.Is(err, context.Canceled) {
		t.Fatalf("open: got %v, want that it was cancelled", err)
	}
}

func TestClosedBeforeItsEnd(t *testing.T) {
	w := plainWorld(t)
	w.image("c", "1", disked(t, noise(20<<20)))
	s, err := Open(t.Context(), w.ref("c:1"), quick)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = s.Read(make([]byte, 1))
	fails(t, err, api.Unavailable, "closed")
	fails(t, s.Settled(), api.Unavailable, "closed")
}

// TestSettledReadsToTheEnd: a reader may stop at the size. Settled reads the rest, which proves the bytes.
func TestSettledReadsToTheEnd(t *testing.T) {
	w := plainWorld(t)
	body := noise(1 << 20)
	two := tarOf(t, file{name: "disk/a", body: body}, file{name: "disk/b"})
	for layer, ok := range map[string]bool{string(disked(t, body)): true, string(two): false} {
		w.image("s", "1", []byte(layer))
		s, err := Open(t.Context(), w.ref("s:1"), quick)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		got := make([]byte, s.Size)
		if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, body) {
			t.Fatal(err)
		}
		if err := s.Settled(); (err == nil) != ok {
			t.Fatalf("got %v, want ok %v", err, ok)
		}
	}
}
