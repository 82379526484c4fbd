package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/origin"
	"drover.io/drover/driver/cli/progress"
	"drover.io/drover/driver/cli/restarts"
	"drover.io/drover/driver/cli/text"
	"drover.io/drover/driver/cli/upload"
)

// imageFlags are the common flags of all commands that create an image.
type imageFlags struct {
	name, checksum, nodes, disks string
	secret                       string
	plainHTTP                    bool
	copies                       int32
	background                   bool
}

func (f *imageFlags) addFlags(c *cobra.Command, canWait bool) {
	c.Flags().StringVar(&f.name, "name", "", "name of the image (default: from the file's name)")
	f.addSharedFlags(c)
	if canWait {
		c.Flags().BoolVar(&f.background, "background", false, "return at once; follow with drover image show")
		f.addServer(c)
	}
}

// addServer adds the flags for origins on servers.
func (f *imageFlags) addServer(c *cobra.Command) {
	c.Flags().StringVar(&f.secret, "secret", "", "Secret with credentials of the server: [NAMESPACE/]NAME")
	c.Flags().BoolVar(&f.plainHTTP, "plain-http", false, "a registry may be used without TLS")
}

func (f *imageFlags) addChecksum(c *cobra.Command) {
	c.Flags().StringVar(&f.checksum, "checksum", "", "expected SHA-512 of the source's bytes, 128 hex digits")
}

// addSharedFlags adds the flags that also apply to a clone.
func (f *imageFlags) addSharedFlags(c *cobra.Command) {
	f.addChecksum(c)
	c.Flags().Int32Var(&f.copies, "min-copies", 1, "number of disks that shall hold the image at least")
	c.Flags().StringVar(&f.nodes, "node-selector", "", "only nodes with these tags: a,b")
	c.Flags().StringVar(&f.disks, "disk-selector", "", "only disks with these tags: a,b")
}

func (f *imageFlags) newImage(source string, st api.SourceType, params map[string]string) (*api.BackingImage, error) {
	name := f.name
	if name == "" {
		name = origin.NameFrom(source)
	}
	if err := api.ValidateImageName(name); err != nil {
		return nil, fmt.Errorf("%w; choose one with --name", err)
	}
	img := &api.BackingImage{Spec: api.BackingImageSpec{
		SourceType: st, SourceParameters: params, Checksum: f.checksum, MinNumberOfCopies: f.copies,
		NodeSelector: parseTags(f.nodes), DiskSelector: parseTags(f.disks),
	}}
	img.Name = name
	ref, err := parseSecret(f.secret)
	if err != nil {
		return nil, err
	}
	img.Spec.SecretRef = ref
	img.Spec.Normalize()
	return img, img.Spec.Validate()
}

func (a *app) imageImport() *cobra.Command {
	var f imageFlags
	c := &cobra.Command{
		Use:   "import URL|FILE",
		Short: "Make a backing image of an http(s) URL, of a containerDisk in a registry (docker://...), or of a file",
		Long: "Makes a backing image and waits until it is ready. A URL is fetched by a node of Drover. A file is read in\n" +
			"place where this machine is the only node, and uploaded otherwise. The same import again joins the first;\n" +
			"a failed image is imported again. Loopback, link-local and private addresses are refused unless the\n" +
			"setting allow-private-image-sources is true.",
		Example: "  drover image import https://example.org/debian-12.qcow2 --name debian\n" +
			"  drover image import docker://registry.example.com/disks/fedora:42\n" +
			"  drover image import https://images.example/golden.img --secret logins/images\n" +
			"  drover image import ./golden.img --checksum $(sha512sum golden.img | cut -d' ' -f1)",
		Args: checkArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			from, err := origin.Find(ctx, c, left[0], origin.Options{PlainHTTP: f.plainHTTP, Secret: f.secret != ""})
			if err != nil {
				return explain(ctx, err)
			}
			defer func() { _ = from.Close() }()
			return a.importImage(ctx, cmd, c, &f, from)
		},
	}
	f.addFlags(c, true)
	return c
}

func (a *app) imageClone() *cobra.Command {
	var f imageFlags
	c := &cobra.Command{
		Use:   "clone IMAGE NAME",
		Short: "Make a backing image with the content of another image",
		Long: "Makes a backing image with the content of another image, which must be ready. On disks with a copy of the\n" +
			"other image the clone takes no room and is ready at once. The clone has its own number of copies and its\n" +
			"own selectors; the other image can be deleted afterwards.",
		Example: "  drover image clone debian-12 golden --min-copies 2",
		Args:    checkArgs(cobra.ExactArgs(2)), ValidArgsFunction: a.completeNames(images, true),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var origin api.BackingImage
			if err := getObject(ctx, c, "image", left[0], &origin); err != nil {
				return err
			}
			f.name = left[1]
			img, err := f.newImage(left[1], api.SourceClone, map[string]string{"backingImage": left[0]})
			if err != nil {
				return err
			}
			return a.makeImage(ctx, cmd, c, img, nil, f.background)
		},
	}
	f.addSharedFlags(c)
	c.Flags().BoolVar(&f.background, "background", false, "return at once; follow with drover image show")
	return c
}

func (a *app) imageUpload() *cobra.Command {
	var f imageFlags
	c := &cobra.Command{
		Use: "upload FILE", Short: "Make a backing image of a file, sent over HTTP to the node that will hold it",
		Args: checkArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			from, err := origin.Upload(left[0])
			if err != nil {
				return err
			}
			defer func() { _ = from.Close() }()
			return a.importImage(ctx, cmd, c, &f, from)
		},
	}
	f.addFlags(c, false)
	return c
}

// importImage makes the image of an origin, and sends a file that no node can read itself.
func (a *app) importImage(ctx context.Context, cmd *cobra.Command, c client.WithWatch, f *imageFlags,
	from *origin.Origin) error {
	img, err := f.newImage(from.Name, from.Type, from.Parameters)
	if err != nil {
		return err
	}
	body, err := uploadOf(from, a.loadConfig)
	if err != nil {
		return err
	}
	if body != nil && f.background {
		return usagef("an upload cannot run in the background: this command sends the bytes")
	}
	return a.makeImage(ctx, cmd, c, img, body, f.background)
}

// uploadOf is the file that the command has to send; nil: a node reads the bytes of the origin itself.
func uploadOf(from *origin.Origin, loadConfig func() (*rest.Config, error)) (*upload.File, error) {
	if from.Type != api.SourceUpload {
		return nil, nil
	}
	server, err := loadConfig()
	return &upload.File{File: from.File, Server: server}, err
}

// makeImage creates the image, or joins an equal image, and waits until the image is ready.
func (a *app) makeImage(ctx context.Context, cmd *cobra.Command, c client.WithWatch, img *api.BackingImage,
	body *upload.File, background bool) error {
	began := time.Now()
	wish := img
	img, err := ensureImage(ctx, c, wish)
	if errors.Is(err, context.Canceled) && isThere(ctx, c, wish) {
		return explainInterrupt(err, wish.Name, body) // the API created the image; ctx ended before the answer
	}
	if err != nil {
		return err
	}
	if background {
		a.printOutcome(cmd, "backingimage", img.Name, "is being made: follow it with `drover image show "+img.Name+"`")
		return nil
	}
	p := progress.New(cmd.ErrOrStderr(), "image "+img.Name)
	img, err = awaitImage(ctx, c, img, p, body)
	p.Clear()
	switch {
	case err == nil:
	case !errors.Is(err, context.Canceled):
		return err
	default:
		return explainInterrupt(err, img.Name, body)
	}
	return a.printObject(cmd.OutOrStdout(), img, func(w io.Writer) {
		if img.Status.Readable {
			fmt.Fprintf(w, "image %q readable: volumes can use the image, %s virtual; the content arrives in the background\n",
				img.Name, api.SizeText(img.Status.VirtualSize))
			return
		}
		fmt.Fprintf(w, "image %q ready: %s, %s virtual, %s on disk, in %s\n", img.Name, img.Status.Format,
			api.SizeText(img.Status.VirtualSize), api.SizeText(img.Status.Size), text.Seconds(time.Since(began)))
	})
}

// explainInterrupt tells the user of an interrupted command whether the image continues.
func explainInterrupt(err error, image string, body *upload.File) error {
	if body != nil {
		return fmt.Errorf("%w: the node keeps the received bytes of image %[2]q for 5 minutes: the same command sends "+
			"the rest, `drover image delete %[2]s` gives the image up", err, image)
	}
	return fmt.Errorf("%w: image %[2]q is made nevertheless: follow it with `drover image show %[2]s`, end it with "+
		"`drover image delete %[2]s`", err, image)
}

// isThere checks, after the end of ctx, whether an image equal to want is in progress.
func isThere(ctx context.Context, c client.Client, want *api.BackingImage) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	var have api.BackingImage
	return c.Get(ctx, client.ObjectKey{Name: want.Name}, &have) == nil && have.Status.State != api.ImageReady &&
		isSame(&have, want)
}

// isSame reports whether an existing image satisfies want.
func isSame(have, want *api.BackingImage) bool {
	return have.Spec.SourceType == want.Spec.SourceType &&
		maps.Equal(have.Spec.SourceParameters, want.Spec.SourceParameters) &&
		(want.Spec.SecretRef == nil || have.Spec.SecretRef != nil && *want.Spec.SecretRef == *have.Spec.SecretRef) &&
		(want.Spec.Checksum == "" || want.Spec.Checksum == have.Spec.Checksum || want.Spec.Checksum == have.Status.Checksum)
}

// ensureImage creates the image. ensureImage joins an existing image that satisfies want, and replaces a failed image.
func ensureImage(ctx context.Context, c client.WithWatch, want *api.BackingImage) (*api.BackingImage, error) {
	err := c.Create(ctx, want)
	if err == nil {
		return want, nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return nil, explain(ctx, err)
	}
	var have api.BackingImage
	if err := getObject(ctx, c, "image", want.Name, &have); err != nil {
		return nil, err
	}
	if have.Status.State == api.ImageFailed && have.Status.ReadyCopies == 0 {
		if err := deleteImage(ctx, c, want.Name, io.Discard); err != nil {
			return nil, err
		}
		want.ResourceVersion, want.UID = "", ""
		return want, explain(ctx, c.Create(ctx, want))
	}
	if !isSame(&have, want) {
		return nil, api.Errorf(api.Exists, "image %q exists already, made from another source: choose another --name, or "+
			"`drover image delete %s`", want.Name, want.Name)
	}
	return &have, nil
}

// awaitImage follows image and copies until the image is readable, ready or failed. awaitImage sends a body to the copy
// that asks for the body.
func awaitImage(ctx context.Context, c client.WithWatch, img *api.BackingImage, p *progress.Bar, body *upload.File) (
	*api.BackingImage, error) {
	name := img.Name
	errReady := errors.New("ready") // ends the group: the other watchers and the sender stop
	g, gctx := errgroup.WithContext(ctx)
	var mu sync.Mutex
	last := img
	g.Go(func() error {
		gone := api.Errorf(api.NotFound, "image %q was deleted while it was being made", name)
		return restarts.Through(gctx, p.Show, func() error {
			_, err := awaitObject(gctx, c, name, gone, func(i *api.BackingImage) (bool, error) {
				mu.Lock()
				last = i
				mu.Unlock()
				switch {
				case i.CanRead():
					return true, errReady
				case i.Status.State == api.ImageFailed:
					return true, api.Errorf(api.Other, "image %q failed: %s", name, i.Status.Message)
				}
				if len(i.Status.Copies) == 0 { // otherwise the copies report below
					p.Show("pending", 0, 0)
				}
				return false, nil
			})
			return err
		})
	})
	to, stop := "", func() {} // address of the upload and the end of its sender
	g.Go(func() error {
		defer func() { stop() }()
		see := func(o client.Object) (bool, error) {
			switch st := o.(*api.ImageCopy).Status; {
			case body == nil && st.State != "":
				p.Show(string(st.State), st.BytesDone, st.BytesTotal)
			case body != nil && st.UploadURL != "" && st.UploadURL != to:
				stop()
				sctx, cancel := context.WithCancel(gctx)
				to, stop = st.UploadURL, cancel
				s, err := upload.New(name, st.UploadURL, st.UploadCA, body, p.Show)
				if err != nil {
					return true, err
				}
				g.Go(func() error {
					defer s.Close()
					if err := s.Send(sctx); sctx.Err() == nil {
						return err
					}
					return gctx.Err() // the upload continues at another address
				})
			}
			return false, nil
		}
		return restarts.Through(gctx, p.Show, func() error {
			return explain(gctx, await.Each(gctx, c, &api.ImageCopyList{}, see,
				client.MatchingLabels{api.LabelImage: api.LabelValue(name)}))
		})
	})
	err := g.Wait()
	mu.Lock()
	defer mu.Unlock()
	if errors.Is(err, errReady) {
		return last, nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return last, explainTimeout(err, "image %q is %s%s; the import continues, see `drover image show %s`", name,
		last.Status.State, text.Colon(last.Status.Message), name)
}
