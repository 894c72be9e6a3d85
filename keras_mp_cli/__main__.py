from keras_mp_cli import main

if __name__ == "__main__":
    main()
