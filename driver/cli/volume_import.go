package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/origin"
	"drover.io/drover/driver/cli/progress"
	"drover.io/drover/driver/cli/restarts"
	"drover.io/drover/driver/cli/upload"
)

func (a *app) volumeImport() *cobra.Command {
	var f volumeFlags
	var from imageFlags
	v := &f.volume
	c := &cobra.Command{
		Use:   "import URL|FILE",
		Short: "Make a volume with the content of a disk: of a file, an http(s) URL, or a containerDisk in a registry",
		Long: "Makes a volume with the content of a file or URL, in any format of `drover image import`, and waits until\n" +
			"the volume can be used. No image is left. The volume is as large as the disk inside the file, or larger with\n" +
			"--size. The volume of an interrupted or failed import is deleted, unless it is attached.",
		Example: "  drover volume import ./db.raw --name db\n" +
			"  drover volume import https://example.org/debian-12.qcow2 --name vm-1 --size 40Gi --replicas 2",
		Args: checkArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			began := time.Now()
			o, err := origin.Find(ctx, c, left[0], origin.Options{PlainHTTP: from.plainHTTP, Secret: from.secret != ""})
			if err != nil {
				return explain(ctx, err)
			}
			defer func() { _ = o.Close() }()
			v.Name = cmp.Or(v.Name, origin.NameFrom(o.Name))
			if err := checkName("volume", v.Name); err != nil {
				return fmt.Errorf("%w; choose one with --name", err)
			}
			if v.Spec.ImportFrom, err = from.newImport(o); err != nil {
				return err
			}
			if v.Spec.Size = api.MinVolumeSize; f.size != "" {
				if v.Spec.Size, err = volumeSize(f.size); err != nil {
					return err
				}
			}
			f.applyShared(cmd, nil)
			body, err := uploadOf(o, a.loadConfig)
			if err != nil {
				return err
			}
			return a.importVolume(ctx, cmd, c, &f, body, began)
		},
	}
	c.Flags().StringVar(&v.Name, "name", "", "name of the volume (default: from the file's name)")
	c.Flags().StringVar(&f.size, "size", "", "size: 10Gi, 500Mi (default: that of the disk inside the file)")
	from.addChecksum(c)
	from.addServer(c)
	f.addShared(c)
	return c
}

// newImport is the import of an origin in the spec of a volume.
func (f *imageFlags) newImport(o *origin.Origin) (*api.VolumeImport, error) {
	f.name, f.copies = "import", 1 // any valid ones: the checks are those of an image
	img, err := f.newImage(o.Name, o.Type, o.Parameters)
	if err != nil {
		return nil, err
	}
	s := &img.Spec
	return &api.VolumeImport{SourceType: s.SourceType, SourceParameters: s.SourceParameters, SecretRef: s.SecretRef,
		Checksum: s.Checksum}, nil
}

// importVolume creates a volume with an import, and waits until the volume can be used. After an error no volume is
// left. A body is sent to the node that asks for it.
func (a *app) importVolume(ctx context.Context, cmd *cobra.Command, c client.WithWatch, f *volumeFlags,
	body *upload.File, began time.Time) error {
	lasting, cancel := cleanup(ctx)
	defer cancel()
	v := &f.volume
	if err := createVolume(lasting, c, v); err != nil { // an interrupt does not leave open whether the volume exists
		return err
	}
	vol, err := followImport(ctx, cmd, c, f, body)
	if err == nil {
		return a.printObject(cmd.OutOrStdout(), vol, func(w io.Writer) { describe.CreatedVolume(w, vol, began) })
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: volume %q is not imported", context.Cause(ctx), v.Name)
	}
	return errors.Join(err, discardVolume(ctx, c, v, cmd.ErrOrStderr()))
}

// followImport waits until the volume of an import can be used.
func followImport(ctx context.Context, cmd *cobra.Command, c client.WithWatch, f *volumeFlags,
	body *upload.File) (*api.Volume, error) {
	name, img := f.volume.Name, &api.BackingImage{}
	p := progress.New(cmd.ErrOrStderr(), "volume "+name)
	await := func(ready func(*api.Volume) bool) (vol *api.Volume, err error) {
		err = restarts.Through(ctx, p.Show, func() (err error) {
			vol, err = awaitVolume(ctx, c, name, cmd.ErrOrStderr(), ready)
			return err
		})
		return vol, err
	}
	isPast := func(v *api.Volume) bool { return v.Status.State != "" && v.Status.State != api.VolumeCreating }
	vol, err := await(func(v *api.Volume) bool {
		st := v.Status.RestoreStatus
		return isPast(v) || st != nil && st.BackingImage != "" &&
			c.Get(ctx, client.ObjectKey{Name: st.BackingImage}, img) == nil
	})
	if err == nil && !isPast(vol) {
		img, err = awaitImage(ctx, c, img, p, body)
		p.Clear()
		switch {
		case api.Is(err, api.NotFound): // deleted, as soon as every replica had the data, or with the volume
		case img.Status.State == api.ImageFailed:
			return nil, api.Errorf(api.Other, "volume %q: the import failed: %s", name, img.Status.Message)
		case err != nil:
			return nil, err
		}
		vol, err = await(isPast)
	}
	if asked := f.volume.Spec.Size; err == nil && f.size != "" && vol.Spec.Size > asked {
		err = api.Errorf(api.OutOfRange, "%s is less than the %s of the disk inside the file: ask for at least that, or "+
			"leave --size out", api.SizeText(asked), api.SizeText(vol.Spec.Size))
	}
	return vol, err
}

// discardVolume deletes the volume of an import that ended early, with all that arrived, unless a user attached it.
func discardVolume(ctx context.Context, c client.WithWatch, v *api.Volume, remarks io.Writer) error {
	ctx, cancel := cleanup(ctx)
	defer cancel()
	if att, err := getAttachment(ctx, c, v.Name); err != nil || att != nil {
		return errors.Join(err, fmt.Errorf("volume %q is left, because it may be in use; delete it with "+
			"`drover volume delete %[1]s`", v.Name))
	}
	err := explain(ctx, client.IgnoreNotFound(c.Delete(ctx, v, client.Preconditions{UID: &v.UID})))
	if err == nil {
		err = awaitGone(ctx, c, remarks, "volume", v, undeletedReason)
	}
	if err != nil {
		return fmt.Errorf("volume %q is left: %w; delete it with `drover volume delete %[1]s`", v.Name, err)
	}
	return nil
}
