package registry

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/archive"
)

// What the layers of one image may hold beside the disk, in all.
const (
	maxHeaders = 1 << 20  // files and folders
	maxBeside  = 64 << 30 // bytes of them, unpacked
	maxHidden  = 10_000   // files that an upper layer removes
	maxName    = 260      // bytes of a file's name, and of what marks it as removed
)

// bombRatio is how many bytes a packed layer's byte may stand for, where a disk has more than bombFloor. gzip cannot
// reach it; for zstd it is an empty disk, and a wish for work without end.
const (
	bombRatio = 10_000
	bombFloor = 1 << 30
)

const (
	whiteout = ".wh."         // before a name: it is removed from the layers below
	opaque   = ".wh..wh..opq" // the folder's content in the layers below is removed
)

// walk looks for the one disk file through the layers of an image, the topmost first. It is a pure reader of archives:
// whatever it is fed, it gives the header of one ordinary file, or an error.
type walk struct {
	image   string // for messages
	found   string // the disk
	hidden  map[string]bool
	closed  bool // the layers below have nothing to say about /disk/
	seen    []string
	headers int
	beside  int64

	// of the current layer; they count for those below
	hides  []string
	closes bool
}

// disk finds the next disk file of a layer; io.EOF: there is none in the rest of it. A second disk is an error.
func (w *walk) disk(tr *tar.Reader) (*tar.Header, error) {
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		if err != nil {
			return nil, err
		}
		if w.headers++; w.headers > maxHeaders {
			return nil, api.Errorf(api.OutOfRange, "%s: the image holds more than %d files", w.image, maxHeaders)
		}
		name, err := w.look(h)
		if err != nil {
			return nil, err
		}
		if name != "" {
			w.found = name
			w.hides = append(w.hides, name)
			return h, nil
		}
		if h.Size > maxBeside-w.beside {
			return nil, api.Errorf(api.OutOfRange, "%s: the image holds more than %d GiB beside the disk (%q)", w.image,
				maxBeside>>30, clip(h.Name))
		}
		w.beside += h.Size
	}
}

// look says what an entry means for /disk/: the name of the disk, where it is one.
func (w *walk) look(h *tar.Header) (string, error) {
	at, ok := split(h.Name)
	if !ok || len(at) == 0 || h.Typeflag == tar.TypeXGlobalHeader {
		return "", nil
	}
	dir := h.Typeflag == tar.TypeDir
	switch {
	case at[0] != "disk" || len(at) == 1 && !dir:
		if len(at) == 1 && slices.Contains([]string{"disk", whiteout + "disk", opaque}, at[0]) {
			w.closes = true
		}
		w.note(at[0])
		return "", nil
	case len(at) != 2 || w.closed:
		return "", nil
	case len(at[1]) > maxName:
		return "", api.Errorf(api.Corrupt, "%s: the image holds a file in /disk/ with a name of %d bytes", w.image,
			len(at[1]))
	case at[1] == opaque:
		w.closes = true
		return "", nil
	case strings.HasPrefix(at[1], whiteout):
		return "", w.hide(strings.TrimPrefix(at[1], whiteout))
	case w.hidden[at[1]]:
		return "", nil
	case dir: // nobody looks for the disk further down
		return "", w.hide(at[1])
	case w.found == at[1]:
		return "", api.Errorf(api.Corrupt, "%s: the image holds %s twice in one layer", w.image, shown(at[1]))
	case w.found != "":
		return "", api.Errorf(api.Invalid, "%s: the image holds more than one file in /disk/ (%s and %s): which one is the "+
			"disk cannot be known", w.image, shown(w.found), shown(at[1]))
	}
	return at[1], w.ordinary(h)
}

// note keeps the first names at the top, to tell what there is instead of a disk.
func (w *walk) note(top string) {
	top = "/" + strings.Clone(clip(top))
	if !strings.HasPrefix(top, "/"+whiteout) && len(w.seen) < 8 && !slices.Contains(w.seen, top) {
		w.seen = append(w.seen, top)
	}
}

// ordinary refuses a disk that is no plain run of bytes.
func (w *walk) ordinary(h *tar.Header) error {
	what := ""
	switch h.Typeflag {
	case tar.TypeReg:
		for k := range h.PAXRecords {
			if strings.HasPrefix(k, "GNU.sparse.") {
				what = "a sparse entry of the archive"
			}
		}
	case tar.TypeGNUSparse:
		what = "a sparse entry of the archive"
	case tar.TypeLink, tar.TypeSymlink:
		what = fmt.Sprintf("a link to %q", clip(h.Linkname))
	default:
		what = "no file"
	}
	if what != "" {
		return api.Errorf(api.Unsupported, "%s: %q is %s: the disk must be an ordinary file in /disk/", w.image,
			clip(h.Name), what)
	}
	return nil
}

func (w *walk) hide(name string) error {
	if len(w.hides)+len(w.hidden) >= maxHidden {
		return api.Errorf(api.OutOfRange, "%s: the image removes more than %d files", w.image, maxHidden)
	}
	w.hides = append(w.hides, strings.Clone(name))
	return nil
}

// below goes on to the next layer down: what this one removes or replaces is not there any more.
func (w *walk) below() {
	if w.hidden == nil {
		w.hidden = map[string]bool{}
	}
	for _, n := range w.hides {
		w.hidden[n] = true
	}
	w.closed = w.closed || w.closes
	w.hides, w.closes = nil, false
}

// none is the error for an image without a disk.
func (w *walk) none() error {
	has := "it is empty"
	if len(w.seen) > 0 {
		has = "it has " + strings.Join(w.seen, " ")
	}
	return api.Errorf(api.Invalid, "%s is not a containerDisk: there is no file in /disk/ (%s)", w.image, has)
}

// fits refuses a file that claims what cannot be.
func (w *walk) fits(h *tar.Header, layer int64, packed bool) error {
	switch {
	case h.Size > api.MaxVolumeSize:
		return api.Errorf(api.OutOfRange, "%s: %s claims %d bytes, more than a volume can have (%d)", w.image, shown(w.found),
			h.Size, api.MaxVolumeSize)
	case !packed && h.Size > layer:
		return api.Errorf(api.Corrupt, "%s: %s claims %d bytes in a layer of %d", w.image, shown(w.found), h.Size, layer)
	case h.Size > bombFloor && h.Size/bombRatio > layer:
		return api.Errorf(api.Corrupt, "%s: %s claims %d bytes, packed into a layer of %d: such a thing is made to do harm",
			w.image, shown(w.found), h.Size, layer)
	}
	return nil
}

func shown(name string) string { return fmt.Sprintf("%q", "/disk/"+clip(name)) }

// split takes a name of an archive apart. A name with .. in it means nothing to us, wherever it leads.
func split(name string) (at []string, ok bool) {
	for e := range strings.SplitSeq(name, "/") {
		switch e {
		case "", ".":
		case "..":
			return nil, false
		default:
			if len(at) < 3 { // deeper is all the same
				at = append(at, e)
			}
		}
	}
	return at, true
}

// unpack gives the archive inside a blob, by its first bytes: what a manifest calls a layer is often wrong. It is nil
// where the blob is the archive as it is.
func unpack(blob *bufio.Reader) (*archive.Reader, error) {
	head, err := blob.Peek(archive.HeadSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch f := archive.Detect(head); f {
	case archive.Gzip, archive.Zstd:
		return archive.NewReader(blob, f, archive.Limits{})
	}
	return nil, nil
}
