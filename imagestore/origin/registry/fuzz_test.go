package registry

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"drover.io/drover/api"
)

// FuzzWalk feeds two arbitrary layers to the search for the disk. A found disk is a single ordinary file with a
// possible name and size, and no upper layer hides the file.
func FuzzWalk(f *testing.F) {
	x := []byte("some bytes")
	for _, a := range [][]byte{disked(f, x), tarOf(f, file{name: "disk/a", body: x}, file{name: "disk/b", body: x}),
		tarOf(f, file{name: "etc/x", body: x}), tarOf(f, file{name: "disk/.wh.disk.img"}, file{name: ".wh.disk"}),
		tarOf(f, file{name: "disk/.wh..wh..opq"}), tarOf(f, file{name: "/disk/../x", kind: tar.TypeSymlink, link: "/"}),
		tarOf(f, file{name: "disk/" + string(bytes.Repeat([]byte("n"), 120)), body: x})} {
		for _, how := range []string{"none", "gzip", "zstd"} {
			f.Add(pack(f, how, a), pack(f, how, disked(f, x)))
		}
	}
	f.Fuzz(func(t *testing.T, upper, lower []byte) {
		w := &diskSearch{image: "docker://registry.example.com/a"}
		found := 0
		for _, layer := range [][]byte{upper, lower} {
			buf := bufio.NewReader(bytes.NewReader(layer))
			plain, err := unpackLayer(buf)
			if err != nil {
				return
			}
			files := io.Reader(buf)
			if plain != nil {
				defer plain.Close()
				files = plain
			}
			tr := tar.NewReader(files)
			for {
				h, err := w.nextDisk(tr)
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					if len(err.Error()) > 1000 {
						t.Fatalf("a message of %d bytes", len(err.Error()))
					}
					return
				}
				if found++; found > 1 {
					t.Fatal("more than one disk was given out")
				}
				at, ok := splitName(h.Name)
				if !ok || len(at) != 2 || at[0] != "disk" || at[1] != w.found || w.closed || w.hidden[at[1]] ||
					h.Typeflag != tar.TypeReg || h.Size < 0 {
					t.Fatalf("this is a disk: %+v", h)
				}
				if w.checkSize(h, int64(len(layer)), plain != nil) != nil {
					return
				}
				n, err := io.Copy(io.Discard, io.LimitReader(tr, 1<<20))
				if n > h.Size || err == nil && n < min(h.Size, 1<<20) {
					t.Fatalf("%d bytes of %d: %v", n, h.Size, err)
				}
				if err != nil {
					return
				}
			}
			w.nextLayer()
		}
	})
}

// FuzzManifest feeds arbitrary bytes to the parser of manifests: an answer has layers or images, within the limits.
func FuzzManifest(f *testing.F) {
	layer := object{"mediaType": types.OCILayer, "size": 10, "digest": digest(nil)}
	for _, m := range []object{image(types.OCIManifestSchema1, layer), {"schemaVersion": 1, "fsLayers": []object{{}}},
		{"schemaVersion": 2, "mediaType": types.OCIImageIndex, "manifests": []object{
			{"digest": digest(nil), "platform": object{"os": "linux", "architecture": "amd64"}},
			{"digest": digest(nil), "platform": object{"os": "linux", "architecture": "arm64", "variant": "v8"}}}}} {
		b, err := json.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, string(types.OCIImageIndex))
		f.Add(b, string(types.OCIManifestSchema1))
	}
	c := &client{name: "docker://registry.example.com/a", opts: Options{Arch: "amd64"}}
	f.Fuzz(func(t *testing.T, body []byte, contentType string) {
		m, err := c.parseManifest(body, contentType)
		if err != nil {
			if api.KindOf(err) == api.Other || len(err.Error()) > 1000 {
				t.Fatalf("not a message: %v", err)
			}
			return
		}
		if len(m.Layers) > 0 && len(m.Manifests) > 0 || len(m.Layers) > maxEntries || len(m.Manifests) > maxEntries {
			t.Fatalf("%d layers, %d images", len(m.Layers), len(m.Manifests))
		}
		if len(m.Manifests) > 0 {
			if one, err := c.selectImage(m.Manifests); err == nil && one.Digest.Hex == "" {
				t.Fatal("an image without a digest was chosen")
			}
		}
	})
}

// FuzzReference: a valid reference names a host and a repository, and no way out of the address.
func FuzzReference(f *testing.F) {
	for _, s := range []string{"registry.example.com/a:b", "[::1]:5/a@" + digest(nil), "localhost/a/../b", "a:b@c/d"} {
		f.Add(Scheme + s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ref, err := parseReference(s, false)
		if err != nil {
			return
		}
		if ref.Context().RegistryStr() == "" || ref.Context().RepositoryStr() == "" || ref.Identifier() == "" {
			t.Fatal(fmt.Sprint(ref))
		}
	})
}

// FuzzLogin: an account found in a Docker configuration is the account of the image's own registry, and no message
// repeats the configuration.
func FuzzLogin(f *testing.F) {
	for _, s := range []string{`{"auths":{"registry.example.com":{"username":"u","password":"hunter2"}}}`,
		`{"auths":{"https://registry.example.com/v2/":{"auth":"cm9ib3Q6aHVudGVyMg=="},"other.example.com":{}}}`,
		`{"auths":{"registry.example.com/team":{"username":"u","password":"p"},"registry.example.com.evil":{"auth":"x"}}}`,
		`{"auths":{"registry.example.com/":{"identitytoken":"hunter2"},"":{"username":"u","password":"p"}}}`,
		`{"auths":["hunter2"]}`, `{"auths":{"registry.example.com":"hunter2"}}`, `{"credsStore":"x"}`, `[]`, "hunter2", ""} {
		f.Add([]byte(s), "registry.example.com/team/disk:1")
		f.Add([]byte(s), "registry.example.com:5000/disk@"+digest(nil))
	}
	f.Fuzz(func(t *testing.T, config []byte, ref string) {
		ref = Scheme + ref
		parsed, bad := parseReference(ref, false)
		user, pass, err := Login(config, ref)
		if err != nil {
			_, _, none := Login([]byte(`{}`), ref)
			said := []string{none.Error(), "the Secret's .dockerconfigjson is no Docker configuration"}
			if bad == nil {
				said = append(said, "the Secret's .dockerconfigjson has no username and password for "+
					parsed.Context().RegistryStr())
			}
			if api.KindOf(err) == api.Other || !slices.Contains(said, err.Error()) || user != "" || pass != "" {
				t.Fatalf("%q, %q, %v", user, pass, err)
			}
			return
		}
		if bad != nil || user == "" || pass == "" {
			t.Fatalf("%q, %q for %q", user, pass, ref)
		}
		var file struct {
			Auths map[string]any `json:"auths"`
		}
		if err := json.Unmarshal(config, &file); err != nil {
			t.Fatal(err)
		}
		for key := range file.Auths {
			if _, rest, ok := strings.Cut(key, "://"); ok {
				key = rest
			}
			if host, _, _ := strings.Cut(key, "/"); host == parsed.Context().RegistryStr() {
				return
			}
		}
		t.Fatalf("the account %q is of another registry than %s", user, parsed.Context().RegistryStr())
	})
}
