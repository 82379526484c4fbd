# trim.sh FOLDER MOUNT-ID: has the file system that is mounted there discard what it does not use. Descriptor 4 keeps it
# mounted.
exec 4<"$1" || exit 3
while read -r name value; do
	[ "$name" = mnt_id: ] && id=$value
done <"/proc/$$/fdinfo/4"
[ "$id" = "$2" ] && [ -d "$1" ] || exit 3
exec fstrim -v "/proc/$$/fd/4/."
